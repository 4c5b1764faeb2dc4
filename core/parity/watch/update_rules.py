"""The update rules of torch's optimizers in numpy, with one rounding after each of torch's operations.

A rule is written once. With the rounding of the parameter's dtype it is the twin; without rounding it is the truth in
FP64. Sources: torch/optim/adam.py, adamw.py and sgd.py, in the single-tensor form. The foreach form rounds at the same
places. `fused` rounds only what it stores, which makes a difference in half precision only. On CUDA, the fused kernels
of Adam and AdamW take their hyperparameters in FP32 (aten/src/ATen/native/cuda/fused_adam_utils.cuh), as
`_adam_in_fp32` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.core.errors import UserError

State = Mapping[str, np.ndarray]


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round float64 values through FP32 to the nearest bfloat16, ties to even. Returns float64 of the same shape."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    # Add just under half a unit of the last kept digit, plus that digit itself: ties go to even.
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)) << np.uint32(16)
    # `ascontiguousarray` returns one dimension for a scalar.
    return np.where(np.isfinite(x), rounded.view(np.float32).reshape(np.shape(x)), x).astype(np.float64)


def to_dtype(dtype: type[np.floating]) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that rounds float64 values to a numpy dtype and returns float64."""
    return lambda x: x.astype(dtype).astype(np.float64)


ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "float64": to_dtype(np.float64),
    "float32": to_dtype(np.float32),
    "float16": to_dtype(np.float16),
    "bfloat16": to_bfloat16,
}


EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Arithmetic:
    """The roundings of an update rule.

    store: rounding of a tensor that is written.
    compute: rounding inside one of torch's operations, which computes in FP32 for narrower dtypes and in FP64 for FP64.
    """

    store: Callable[[np.ndarray], np.ndarray]
    compute: Callable[[np.ndarray], np.ndarray]

    @classmethod
    def of(cls, dtype: str) -> Arithmetic:
        """Return the arithmetic for parameters of a dtype, which is a key of `ROUNDINGS`."""
        return cls(ROUNDINGS[dtype], ROUNDINGS["float64" if dtype == "float64" else "float32"])

    def scalar(self, x: float) -> float:
        """Round a Python float as an operation reads it."""
        return float(self.compute(np.asarray(x)))


EXACT = Arithmetic(lambda x: x, lambda x: x)


def refuse_fp64(a: Arithmetic, why: str) -> None:
    """Raise UserError for FP64 weights if their rule computes in a narrower format."""
    if a.store is ROUNDINGS["float64"]:
        raise UserError(f"FP64 weights, but {why}")


# The kind of comparisons without calibrated bounds: FP32 sums, bounded by their worst-case error (judge.py).
OF_SUMS = "sums"


@dataclass(frozen=True)
class Updated:
    """A parameter after the step and its optimizer state by kind, in float64.

    kinds: kind of moment, or `update` → kind of calibrated bounds, where it is not AdamW's.
    """

    param: np.ndarray
    moments: dict[str, np.ndarray]
    kinds: Mapping[str, str] = field(default_factory=dict)


# An update rule: a function of (parameter, gradient, moments before by kind, step counted from 1, hyperparameters of
# its group, arithmetic). The group also has `dtype`, the parameter's, and `in_codes`, which is True if its optimizer
# state is stored as 8-bit codes.
Rule = Callable[[np.ndarray, np.ndarray, State, int, Mapping[str, Any], Arithmetic], Updated]


# Key added to a group if the kernel takes the other hyperparameters in FP32. No optimizer has this key.
IN_FP32 = "in_fp32"


def adam(p: np.ndarray, g: np.ndarray, before: State, step: int, group: Mapping[str, Any], a: Arithmetic) -> Updated:
    """Return the update of Adam with g ← g + λp, or AdamW's p ← p·(1 − lr·λ) (arXiv 1711.05101).

    AdamW's form is used where the group has `decoupled_weight_decay`.

        m ← m + (1 − β₁)(g − m)        v ← β₂v + (1 − β₂)g²
        p ← p − lr/(1 − β₁ᵗ) · m / (√v̄ / √(1 − β₂ᵗ) + ε)

    v̄ is v, or its maximum so far under `amsgrad`. float64 arrays of one shape.
    """
    lr, (beta1, beta2), decay = float(group["lr"]), map(float, group["betas"]), float(group["weight_decay"])
    between = a.compute if group.get("fused") else a.store
    g = -g if group.get("maximize") else g
    zeros = np.zeros_like(p)
    if group.get(IN_FP32):
        return _adam_in_fp32(p, g, before, step, group, a)
    if decay and group["decoupled_weight_decay"]:
        p = between(p * a.scalar(1 - lr * decay))
    elif decay:
        g = between(g + a.scalar(decay) * p)
    m, v = before.get("exp_avg", zeros), before.get("exp_avg_sq", zeros)
    m = a.store(m + a.scalar(1 - beta1) * a.compute(g - m))
    v = a.store(between(v * a.scalar(beta2)) + a.scalar(1 - beta2) * a.compute(g * g))
    moments = {"exp_avg": m, "exp_avg_sq": v}
    if group.get("amsgrad"):
        v = moments["max_exp_avg_sq"] = np.maximum(before.get("max_exp_avg_sq", zeros), v)
    with np.errstate(divide="ignore", invalid="ignore"):  # ε = 0 and no gradient yet: torch returns NaN as well
        if group.get("capturable"):
            # The scalars are FP32 tensors on the device, and −lr/(1 − β₁ᵗ) goes into the denominator.
            first, second = (a.scalar(1 - a.scalar(a.scalar(beta) ** step)) for beta in (beta1, beta2))
            negative = -a.scalar(a.scalar(lr) / first)
            scale = a.scalar(a.scalar(second**0.5) * negative)
            denominator = between(between(between(np.sqrt(v)) / scale) + a.scalar(a.scalar(group["eps"]) / negative))
            return Updated(a.store(p + a.compute(m / denominator)), moments)
        root = a.scalar((1 - beta2**step) ** 0.5)
        denominator = between(between(between(np.sqrt(v)) / root) + a.scalar(group["eps"]))
        return Updated(a.store(p - a.compute(a.scalar(lr / (1 - beta1**step)) * m / denominator)), moments)


def _adam_in_fp32(
    p: np.ndarray, g: np.ndarray, before: State, step: int, group: Mapping[str, Any], a: Arithmetic
) -> Updated:
    """Compute the update of torch's fused kernel on CUDA. β and 1 − β are FP32 numbers. Each line is one rounding.

        m ← fma(β₁, m, fma(−β₁, g, g))        v ← fma(β₂, v, fma(−β₂, g², g²))
        p ← fma(−(lr·λ), p, p) − (lr / (1 − β₁ᵗ)) · m / (√v / √(1 − β₂ᵗ) + ε)

    β₂ = 0.999 is 0.99900001287 in FP32, so v is 1.3e-5 smaller. So is 1 − β₂ᵗ, and the step hardly changes. The truth
    uses the same β, and FP64 otherwise. A product and sum in float64 stand for a fused multiply-add.
    """
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    beta1, beta2 = (float(np.float32(beta)) for beta in group["betas"])
    shrunk = a.scalar(a.scalar(lr) * a.scalar(decay))
    if decay and group["decoupled_weight_decay"]:
        p = a.compute(p - shrunk * p)
    elif decay:
        g = a.compute(g + a.scalar(decay) * p)
    zeros = np.zeros_like(p)
    m, v = before.get("exp_avg", zeros), before.get("exp_avg_sq", zeros)
    square = a.compute(g * g)
    m = a.compute(beta1 * m + a.compute(g - beta1 * g))
    v = a.compute(beta2 * v + a.compute(square - beta2 * square))
    largest = v
    moments = {"exp_avg": a.store(m), "exp_avg_sq": a.store(v)}
    if group.get("amsgrad"):
        largest = np.maximum(before.get("max_exp_avg_sq", zeros), v)
        moments["max_exp_avg_sq"] = a.store(largest)
    first, second = (a.scalar(1 - a.scalar(beta**step)) for beta in (beta1, beta2))
    with np.errstate(divide="ignore", invalid="ignore"):  # ε = 0 and no gradient yet: torch returns NaN as well
        root = a.compute(a.compute(np.sqrt(largest)) / a.scalar(second**0.5))
        moved = a.compute(a.compute(a.scalar(a.scalar(lr) / first) * m) / a.compute(root + a.scalar(group["eps"])))
    return Updated(a.store(p - moved), moments)


def adamw(p: np.ndarray, g: np.ndarray, before: State, step: int, group: Mapping[str, Any], a: Arithmetic) -> Updated:
    """Return the update of Adam with decoupled weight decay. Arguments as in `adam`."""
    return adam(p, g, before, step, {**group, "decoupled_weight_decay": True}, a)


def adam_l2(p: np.ndarray, g: np.ndarray, before: State, step: int, group: Mapping[str, Any], a: Arithmetic) -> Updated:
    """Return the update of torch.optim.Adam, whose decay is coupled unless the group sets `decoupled_weight_decay`.

    Arguments as in `adam`.
    """
    return adam(p, g, before, step, {"decoupled_weight_decay": False, **group}, a)


def sgd(p: np.ndarray, g: np.ndarray, before: State, step: int, group: Mapping[str, Any], a: Arithmetic) -> Updated:
    """Return the update of SGD with momentum μ and dampening τ.

        g ← g + λp        b ← μb + (1 − τ)g, and b ← g at the first step        p ← p − lr·b

    Nesterov's form steps by g + μb. Arrays are float64 of one shape.
    """
    momentum, decay = float(group["momentum"]), float(group["weight_decay"])
    g = -g if group.get("maximize") else g
    g = a.store(g + a.scalar(decay) * p) if decay else g
    moments = {}
    if momentum:
        old = before.get("momentum_buffer")
        kept = 1 - float(group["dampening"])
        b = g if old is None else a.store(a.store(old * a.scalar(momentum)) + a.scalar(kept) * g)
        moments["momentum_buffer"] = b
        g = a.store(g + a.scalar(momentum) * b) if group.get("nesterov") else b
    return Updated(a.store(p - a.scalar(float(group["lr"])) * g), moments)
