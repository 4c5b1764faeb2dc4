"""RoPE is a rotation: it keeps lengths, and a query's product with a key knows their distance alone."""

import numpy as np
import pytest

from lockstep.jax_backend.model import Attention, Rope, rope_tables
from lockstep.parity_tests.tiny import tiny_config

LENGTH, HEAD_DIM, THETA = 96, 16, 1e4
rotate = Attention(tiny_config()).rotate
ROPE = Rope(*rope_tables(LENGTH, HEAD_DIM, THETA))


@pytest.fixture(scope="module")
def rotated():
    """One query and one key, each put at every position: (S, E)."""
    q, k = np.random.default_rng(0).standard_normal((2, HEAD_DIM))
    return q, k, *(np.array(rotate(np.tile(x, (1, LENGTH, 1, 1)), ROPE))[0, :, 0] for x in (q, k))


def test_lengths_are_kept(rotated):
    q, k, q_SE, k_SE = rotated
    np.testing.assert_allclose(np.linalg.norm(q_SE, axis=-1), np.linalg.norm(q), rtol=1e-15 * 4)
    np.testing.assert_allclose(np.linalg.norm(k_SE, axis=-1), np.linalg.norm(k), rtol=1e-15 * 4)


def test_products_know_the_distance_alone(rotated):
    """Shifting query and key together changes nothing; moving one of them does."""
    q, k, q_SE, k_SE = rotated
    products_ST = q_SE @ k_SE.T
    at = np.arange(LENGTH)
    for distance in range(-20, 21):
        diagonal = products_ST[at[20:-20], at[20:-20] - distance]
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=0, atol=1e-13 * np.linalg.norm(q) * np.linalg.norm(k))
    assert np.abs(np.diff(products_ST[40])).min() > 1e-4


def test_position_zero_is_not_turned(rotated):
    q, _, q_SE, _ = rotated
    assert np.array_equal(q_SE[0], q)


def test_rotation_in_the_complex_plane(rotated):
    """Elements i and i + E/2 are one complex number, times exp(i · position · theta^(−2i/E)) (Su et al. 2021)."""
    q, _, q_SE, _ = rotated
    half = HEAD_DIM // 2
    frequency = THETA ** (-2.0 * np.arange(half) / HEAD_DIM)
    turned = (q[:half] + 1j * q[half:]) * np.exp(1j * np.arange(LENGTH)[:, None] * frequency)
    np.testing.assert_allclose(q_SE, np.concatenate((turned.real, turned.imag), -1), rtol=0, atol=1e-13)


def test_heads_are_turned_alike():
    x = np.random.default_rng(0).standard_normal((2, LENGTH, 3, HEAD_DIM))
    together = np.array(rotate(x, ROPE))
    for head in range(3):
        assert np.array_equal(together[:, :, head], np.array(rotate(x[:, :, head : head + 1], ROPE))[:, :, 0])
