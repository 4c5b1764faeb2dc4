"""The global norm and the clip coefficient, from their formulas."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.core.config.schema import OptimConfig
from lockstep.jax_backend.backend import JaxBackend
from lockstep.jax_backend.optim import clip_coefficient, global_norm
from lockstep.parity_tests.tiny import text_batch, tiny_config


@pytest.mark.parametrize(
    "norm, expected",
    [
        (0.0, 1.0),
        (0.4, 1.0),
        (0.5 - 2e-6, 1.0),
        (0.5, 0.5 / (0.5 + 1e-6)),
        (0.8, 0.5 / (0.8 + 1e-6)),
        (1e6, 0.5 / (1e6 + 1e-6)),
    ],
)
def test_coefficient(norm, expected):
    found = clip_coefficient(OptimConfig(clip_norm=0.5), jnp.asarray(norm, jnp.float64))
    assert float(found) == pytest.approx(expected, rel=1e-15)
    assert expected == 1.0 or found < 1.0


def test_a_limit_of_zero_is_no_clipping():
    assert float(clip_coefficient(OptimConfig(clip_norm=0.0), jnp.asarray(1e9))) == 1.0


def test_global_norm():
    """3, 4 and 12 in three parameters of different shapes: 13."""
    grads = {"a": jnp.array([3.0]), "b": jnp.array([[0.0, -4.0]]), "c": jnp.full((3, 3), 4.0)}
    assert float(global_norm(grads)) == pytest.approx(13.0, rel=1e-15)


def test_the_step_clips_what_it_accumulated():
    """Its first moment is (1 − β₁) times the gradient times the coefficient that the record names."""
    config = tiny_config("fp64", layers=1, train={"sequence_length": 16})
    session, batch = JaxBackend().open(config), text_batch(config)
    found = session.gradients(batch)
    record = session.step(batch)
    norm = math.sqrt(sum(float(np.square(g).sum()) for g in found.grads.values()))
    assert record.grad_norm == pytest.approx(norm, rel=1e-14) and norm > config.optim.clip_norm
    assert record.clip_coefficient == pytest.approx(config.optim.clip_norm / (norm + 1e-6), rel=1e-14)
    for name, moment in session.state().optimizer["exp_avg"].items():
        expected = (1 - config.optim.beta1) * record.clip_coefficient * found.grads[name]
        np.testing.assert_allclose(moment, expected, rtol=1e-13)
