"""Scalars of a step against their recomputation in FP64."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.core.backend import Batch
from lockstep.core.config.schema import OptimConfig
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.measures import scalar_bounds

rng = np.random.default_rng(0)
NLL = rng.uniform(1, 9, (8, 64)).astype(np.float32)
TOKENS = np.zeros((8, 64), np.int32)
BATCH = uneven_weights(Batch(TOKENS, TOKENS, np.ones((8, 64), np.float32)), 3)
OPTIM = OptimConfig(clip_norm=0.5)
FP32 = np.dtype(np.float32)


def exact_loss():
    w = BATCH.weights.astype(np.float64)
    return float((NLL * w).sum() / w.sum())


def test_the_loss_that_is_the_weighted_mean_holds():
    assert scalar_bounds.loss(float(np.float32(exact_loss())), NLL, BATCH).ok


@pytest.mark.parametrize("wrong", ["plain mean", "mean of means", "one part in ten thousand"])
def test_a_loss_that_is_another_mean_does_not(wrong):
    w = BATCH.weights
    values = {
        "plain mean": NLL.mean(),
        "mean of means": np.mean([(NLL[i : i + 2] * w[i : i + 2]).sum() / w[i : i + 2].sum() for i in range(0, 8, 2)]),
        "one part in ten thousand": exact_loss() * 1.0001,
    }
    assert not scalar_bounds.loss(float(values[wrong]), NLL, BATCH).ok


def test_gradient_norm():
    grads = {"a": rng.standard_normal(1000).astype(np.float32), "b": rng.standard_normal((10, 10)).astype(np.float32)}
    exact = float(np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in grads.values())))
    assert scalar_bounds.gradient_norm(exact, grads).ok
    twice_b = float(np.sqrt(exact**2 + np.square(grads["b"]).sum()))
    assert not scalar_bounds.gradient_norm(twice_b, grads).ok
    assert not scalar_bounds.gradient_norm(float("nan"), grads).ok


def test_a_norm_that_is_declared_to_be_in_fp64_is_held_to_it():
    """Gains that are left out are 2e-4 of the norm: as much as a serial sum in FP32 may be off."""
    matrix = rng.standard_normal((1024, 1024)).astype(np.float32)
    grads = {"matrix": matrix, "gain": np.full(256, 1.3, np.float32)}
    exact = float(np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in grads.values())))
    without = float(np.linalg.norm(matrix.astype(np.float64)))
    assert scalar_bounds.gradient_norm(float(np.float32(exact)), grads, in_fp64=True).ok
    assert scalar_bounds.gradient_norm(without, grads).ok
    assert not scalar_bounds.gradient_norm(without, grads, in_fp64=True).ok


@pytest.mark.parametrize("norm", [0.1, 0.5, 2.0])
def test_clip_coefficient(norm):
    right = min(1.0, 0.5 / (norm + 1e-6))
    assert scalar_bounds.clip_coefficient(right, norm, OPTIM, FP32).ok
    assert not scalar_bounds.clip_coefficient(right * 1.00001, norm, OPTIM, FP32).ok
    assert scalar_bounds.clip_coefficient(1.0, norm, OptimConfig(clip_norm=0), FP32).ok


def test_optax_clipping_without_the_millionth_is_told_apart():
    assert not scalar_bounds.clip_coefficient(0.5 / 2.0, 2.0, OPTIM, FP32).ok


def test_learning_rate_may_be_rounded_to_fp32_and_no_more():
    assert scalar_bounds.learning_rate(float(np.float32(1e-3)), 1e-3).ok
    assert not scalar_bounds.learning_rate(1.000001e-3, 1e-3).ok


def test_the_bound_of_a_sum_holds_for_the_worst_order_of_summation():
    values = rng.uniform(0, 1, 100_000).astype(np.float32)
    one_by_one = np.cumsum(values, dtype=np.float32)[-1]
    bound, _ = scalar_bounds.sum_bound(values.size)
    off = scalar_bounds.ulps(float(one_by_one), float(values.sum(dtype=np.float64)), FP32)
    assert 0 < off < bound
