"""Scalars of a step, recomputed in FP64 from the candidate's own arrays and bounded in ulp.

A ratio of errors has no meaning for a scalar: honest ones reach 400. Each scalar is therefore compared with the result
of its own arithmetic: the loss with the mean of the NLL, the norm with the norm of the gradients, the coefficient with
the one that follows from this norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lockstep.core.backend import Batch
from lockstep.core.config.schema import OptimConfig
from lockstep.core.parity.measures.stretches import stretches
from lockstep.core.parity.measures.verdict import Measure

# Higham & Mary 2019, theorem 2.4: a sum of n terms has relative error at most λ·√n·u with probability 1 −
# 2·exp(−λ²/2) (for n·λ·√n·u ≪ 1).
CONFIDENCE = 6.0
# Squares of gradients have such a range that many are below half an ulp of the running sum and vanish, always with the
# same sign of error. Then the worst case applies: u per term, halved by the root. Libraries add in at least 16 SIMD
# lanes, and split sums longer than 2^20 into parts. torch's FP32 norm on the CPU had an error of 2,400 ulp at 2^20
# elements.
LANES, LONGEST_RUN = 16, 2**20
# A few rounded operations: one division, one addition, one minimum.
FEW_ULPS = 4.0


def same(one: Any, other: Any) -> bool:
    """Return whether two values of a record are equal. Two NaN are equal, as in a step that was skipped."""
    numbers = isinstance(one, float) and isinstance(other, float)
    return one == other or (numbers and math.isnan(one) and math.isnan(other))


def ulps(value: float, exact: float, dtype: np.dtype[np.floating]) -> float:
    """Return |value − exact| in ulp of `exact` in `dtype`; infinite for a non-finite value."""
    return abs(value - exact) / _spacing(exact, dtype) if math.isfinite(value) else math.inf


def _spacing(exact: float, dtype: np.dtype[np.floating]) -> float:
    return float(np.spacing(np.abs(dtype.type(exact))))


def sum_bound(terms: int) -> tuple[float, str]:
    """Return the largest error of a sum of `terms` terms in ulp of its own precision, and its basis in words."""
    bound = CONFIDENCE * math.sqrt(terms) / 2 + FEW_ULPS
    return bound, f"{CONFIDENCE:g}·√n/2 + {FEW_ULPS:g}, a sum of n = {terms:,}"


def loss(value: float, nll: np.ndarray, batch: Batch) -> Measure:
    """Compare the loss with Σ weight·nll / Σ weight in FP64 from the candidate's own NLL (B, S)."""
    weights = batch.weights.astype(np.float64)
    exact = float((nll.astype(np.float64) * weights).sum() / weights.sum())
    bound, basis = sum_bound(nll.size)
    return Measure("ulp", ulps(value, exact, nll.dtype), None, bound, basis)


def gradient_norm(value: float, grads: Mapping[str, np.ndarray], in_fp64: bool = False) -> Measure:
    """Compare the global gradient norm with the norm of the candidate's own gradients in FP64.

    grads: parameter → gradient, in the stream dtype.
    in_fp64: the candidate declares that it accumulates in FP64. Then its norm of FP32 gradients is correct to an ulp of
    FP32 for any count of numbers. Otherwise it may be a sequential sum in FP32.
    """
    power, largest, dtype = 0.0, 0, np.dtype(np.float32)
    for grad in grads.values():
        for where in stretches(grad.size):
            wide = grad.reshape(-1)[where].astype(np.float64)
            power += float(wide @ wide)
        largest, dtype = max(largest, grad.size), np.result_type(dtype, grad.dtype)
    exact = math.sqrt(power)
    if in_fp64 and dtype == np.float32:
        return Measure("ulp", ulps(value, exact, dtype), None, 1.0, "accumulated in FP64, as the candidate declares")
    return Measure("ulp", ulps(value, exact, dtype), None, *norm_bound(largest + len(grads)))


def norm_bound(terms: int) -> tuple[float, str]:
    """Return the largest error of an L2 norm of `terms` numbers in ulp of its own precision, and its basis in words."""
    bound, basis = sum_bound(terms)
    chain = min(terms, LONGEST_RUN) / LANES
    return bound + chain / 4, f"{basis}, + {chain:,.0f}/4 in one lane"


def norm_of_group(value: float, exact: float, terms: int, dtype: np.dtype[np.floating]) -> Measure:
    """Compare an L2 norm of a record with `exact`, the FP64 norm of at most `terms` numbers.

    If `exact` is not finite, the value must not be finite either. Squares below the smallest normal number of `dtype`
    may vanish from the sum.
    """
    if not math.isfinite(exact):
        return Measure("ulp", math.inf if math.isfinite(value) else 0.0, None, 0.0, "not finite, as its numbers")
    bound, basis = norm_bound(terms)
    lost = math.sqrt(terms * float(np.finfo(dtype).tiny))
    return Measure("ulp", max(abs(value - exact) - lost, 0.0) / _spacing(exact, dtype), None, bound, basis)


def update_ratio(value: float, exact: float, terms: int, dtype: np.dtype[np.floating]) -> Measure:
    """Compare the ratio of an update's norm to that of the weights, as `norm_of_group` does.

    The update may be the optimizer's own, before it was rounded into the weights. The rounding is at most half an ulp
    of the weights, and one ulp if the weights have just doubled.
    """
    norm = norm_of_group(value, exact, terms, dtype)
    if not math.isfinite(exact) or norm.high is None:
        return norm
    rounded = float(np.finfo(dtype).eps) / _spacing(exact, dtype)
    basis = f"twice {norm.basis}; + {rounded:.3g}, an ulp of the weights"
    return Measure("ulp", norm.value, None, 2 * norm.high + rounded, basis)


def clip_coefficient(value: float, norm: float, optim: OptimConfig, dtype: np.dtype[np.floating]) -> Measure:
    """Compare the clip coefficient with min(1, limit / (norm + 1e-6)) from the candidate's norm; 1 without clipping."""
    exact = min(1.0, optim.clip_norm / (norm + 1e-6)) if optim.clip_norm else 1.0
    return Measure("ulp", ulps(value, exact, dtype), None, FEW_ULPS, "one sum, one quotient, one minimum")


def learning_rate(value: float, exact: float) -> Measure:
    """Compare the learning rate with the schedule. One rounding to FP32 is allowed."""
    return Measure("ulp", ulps(value, exact, np.dtype(np.float32)), None, 1.0, "the schedule, rounded once to FP32")
