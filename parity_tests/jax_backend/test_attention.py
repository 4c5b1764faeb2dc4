"""Attention against closed forms, forward and backward."""

import jax
import numpy as np
import pytest

from lockstep.jax_backend.attention import attention
from lockstep.jax_backend.model import Attention
from lockstep.jax_backend.precision import POLICIES
from lockstep.parity_tests.tiny import tiny_config

LENGTH, SHAPE = 24, (2, 24, 3, 8)
COUNT = np.arange(1, LENGTH + 1)[None, :, None, None]


@jax.jit
def compiled(q, k, v, grad):
    out, back = jax.vjp(lambda *qkv: attention(*qkv, POLICIES["fp64"]), q, k, v)
    return out, *back(grad)


def run(q, k, v, grad):
    """Output and gradients of q, k, v under fp64."""
    return [np.array(x) for x in compiled(q, k, v, grad)]


@pytest.fixture(scope="module")
def drawn():
    return np.random.default_rng(0).standard_normal((4, *SHAPE))


def test_equal_keys_give_the_running_mean_of_values(drawn):
    q, _, v, grad = drawn
    k = np.broadcast_to(drawn[1][:, :1], SHAPE)
    out, grad_q, _, grad_v = run(q, k, v, grad)
    np.testing.assert_allclose(out, v.cumsum(1) / COUNT, rtol=0, atol=1e-14)
    # Value t is in the mean of every position from t on, with weight 1/(s + 1).
    np.testing.assert_allclose(grad_v, (grad / COUNT)[:, ::-1].cumsum(1)[:, ::-1], rtol=0, atol=1e-14)
    # Where all keys are equal, no query can tell them apart.
    np.testing.assert_allclose(grad_q, 0.0, atol=1e-14)


def test_equal_values_come_out_whatever_the_keys(drawn):
    q, k, _, grad = drawn
    v = np.broadcast_to(drawn[2][:, :1], SHAPE)
    out, grad_q, grad_k, _ = run(q, k, v, grad)
    np.testing.assert_allclose(out, v, rtol=0, atol=1e-14)
    np.testing.assert_allclose(grad_q, 0.0, atol=1e-14)
    np.testing.assert_allclose(grad_k, 0.0, atol=1e-14)


def test_two_keys_give_a_logistic_weight(drawn):
    """At position 1 the weight of key 1 is 1 / (1 + exp(−q·(k₁ − k₀)/√E))."""
    q, k, v, grad = drawn
    out = run(q, k, v, grad)[0]
    score = (q[:, 1] * (k[:, 1] - k[:, 0])).sum(-1, keepdims=True) / np.sqrt(SHAPE[-1])
    weight = 1 / (1 + np.exp(-score))
    np.testing.assert_allclose(out[:, 1], (1 - weight) * v[:, 0] + weight * v[:, 1], rtol=0, atol=1e-14)
    np.testing.assert_allclose(out[:, 0], v[:, 0], rtol=1e-15)


def test_a_far_larger_score_takes_all(drawn):
    """And scores of 10⁵ do not overflow."""
    q, k = np.ones(SHAPE), np.ones(SHAPE)
    k[:, 5] = 1e5
    out = run(q, k, drawn[2], drawn[3])[0]
    np.testing.assert_allclose(out[:, 5:], np.broadcast_to(drawn[2][:, 5:6], out[:, 5:].shape), rtol=1e-15)


def test_kv_heads_are_repeated_in_place():
    """Query heads 0 and 1 share KV head 0, heads 2 and 3 share KV head 1 (Ainslie et al. 2023)."""
    x = np.arange(2.0).reshape(1, 1, 2, 1)
    attention = Attention(tiny_config(heads=4, kv_heads=2))
    assert np.array(attention.expand(x)).ravel().tolist() == [0.0, 0.0, 1.0, 1.0]
