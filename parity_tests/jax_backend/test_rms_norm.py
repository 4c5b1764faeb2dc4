"""RMSNorm against what it is for vectors that can be worked out."""

import numpy as np

from lockstep.jax_backend.model import rms_norm

EPS = 1e-5
GAIN = np.random.default_rng(0).standard_normal(64)


def test_a_constant_vector():
    """Every element is c / √(c² + eps) · gain, for c large and small beside eps, and of either sign."""
    for c in (3.0, -0.5, 1e-3, 1e-6):
        found = np.array(rms_norm(np.full((2, 64), c), GAIN, EPS))
        np.testing.assert_allclose(found, np.tile(c / np.sqrt(c * c + EPS) * GAIN, (2, 1)), rtol=1e-15 * 4)


def test_zeros_stay_zeros():
    assert (np.array(rms_norm(np.zeros((1, 64)), GAIN, EPS)) == 0).all()


def test_the_mean_is_not_taken_away():
    """It is not LayerNorm: 3, 4 has a root mean square of √12.5."""
    found = np.array(rms_norm(np.array([3.0, 4.0]), np.ones(2), 0.0))
    np.testing.assert_allclose(found, np.array([3.0, 4.0]) / np.sqrt(12.5), rtol=1e-15)


def test_length_is_one_and_scale_is_forgotten():
    x = np.random.default_rng(1).standard_normal((5, 64))
    found = np.array(rms_norm(x, np.ones(64), 0.0))
    np.testing.assert_allclose(np.square(found).mean(-1), 1.0, rtol=1e-14)
    np.testing.assert_allclose(np.array(rms_norm(1e3 * x, np.ones(64), 0.0)), found, rtol=1e-14)
