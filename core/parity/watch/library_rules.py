"""Update rules of Muon, Adafactor, and the 8-bit AdamW of torchao and bitsandbytes, in numpy.

The functions round where the libraries round. As in update_rules.py, each function is both truth and twin. Under
`EXACT` it is the truth: moments are not quantised, and Newton–Schulz runs in FP64. Under the arithmetic of the weights'
dtype it is the twin. Sources: torch/optim/_muon.py and _adafactor.py, torchao/optim/adam.py and quant_utils.py, and
bitsandbytes/backends/cpu/ops.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from lockstep.core.components.eight_bit_codes import LEAST_SCALE, quantisation_map
from lockstep.core.components.optimizers import BLOCK
from lockstep.core.parity.watch.update_rules import (
    EPSILON,
    EXACT,
    OF_SUMS,
    ROUNDINGS,
    Arithmetic,
    Rule,
    State,
    Updated,
    adam_l2,
    adamw,
    refuse_fp64,
    sgd,
)

# The quantiser of bitsandbytes on the CPU divides [−1, 1] into this many equal parts.
PARTS = 65536

bf16, fp32 = ROUNDINGS["bfloat16"], ROUNDINGS["float32"]


def muon(p: np.ndarray, g: np.ndarray, before: State, step: int, group: Mapping[str, Any], a: Arithmetic) -> Updated:
    """Return Muon's update of a matrix: b ← μb + (1 − μ)g; p ← p·(1 − lr·λ) − lr·s·NS(u); u = b or μb + (1 − μ)g.

    Source: Jordan 2024, Muon: an optimizer for hidden layers.

    NS is Newton–Schulz in bf16. s is √max(1, rows/columns), or 0.2·√max(rows, columns) under `match_rms_adamw`.
    Arrays are float64 (rows, columns). Raises UserError for FP64 weights.
    """
    refuse_fp64(a, "Newton–Schulz computes in bf16")
    lr, momentum, decay = float(group["lr"]), float(group["momentum"]), float(group["weight_decay"])
    b = a.store(_lerp(before.get("momentum_buffer", np.zeros_like(p)), g, 1 - momentum, a))
    made = _newton_schulz(a.store(_lerp(g, b, momentum, a)) if group["nesterov"] else b, group, a is EXACT)
    rows, columns = p.shape
    own = group.get("adjust_lr_fn") == "match_rms_adamw"
    factor = 0.2 * math.sqrt(max(rows, columns)) if own else math.sqrt(max(1.0, rows / columns))
    p = a.store(p * a.scalar(1 - lr * decay))
    kinds = {"momentum_buffer": "muon/momentum_buffer", "update": "muon/update"}
    return Updated(a.store(p - a.scalar(lr * factor) * made), {"momentum_buffer": b}, kinds)


def _lerp(start: np.ndarray, end: np.ndarray, weight: float, a: Arithmetic) -> np.ndarray:
    """Return `torch.lerp` without its last rounding. The formula starts from the nearer end, as torch does."""
    between = a.compute(end - start)
    return start + a.scalar(weight) * between if weight < 0.5 else end - between * a.scalar(1 - weight)


def _newton_schulz(x: np.ndarray, group: Mapping[str, Any], exact: bool) -> np.ndarray:
    """Move singular values near 1. In bf16, a product and the sum with it are one operation, rounded once."""
    rounded: Callable[[np.ndarray], np.ndarray] = (lambda y: y) if exact else bf16
    a, b, c = map(float, group["ns_coefficients"])
    tall = x.shape[0] > x.shape[1]
    x = rounded(x.T if tall else x)
    norm = float(rounded(np.asarray(np.linalg.norm(x))))
    x = rounded(x / max(norm, float(group["eps"])))
    for _ in range(int(group["ns_steps"])):
        gram = rounded(x @ x.T)
        x = rounded(a * x + rounded(b * gram + c * (gram @ gram)) @ x)
    return x.T if tall else x


def adafactor(
    p: np.ndarray, g: np.ndarray, before: State, step: int, group: Mapping[str, Any], a: Arithmetic
) -> Updated:
    """Return the update of torch's Adafactor (Shazeer & Stern 2018, arXiv 1804.04235), factored over the last two axes.

    ρ = min(lr, 1/√t)      α = max(ε₂, rms(p))·ρ      p ← p·(1 − lr·λ)
    r ← r + t^γ·(mean of g² along rows − r)           c likewise along columns      V = r·c / max(mean(r), ε₁)
    u = g / √max(V, ε₁²)   p ← p − α·u / max(1, rms(u)/d)

    Arrays are float64 of one shape. An array of one axis has V in full, as `variance`.
    """
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    least, floor = group["eps"]
    least = EPSILON[group["dtype"]] if least is None else float(least)
    g = -g if group.get("maximize") else g
    weight = step ** float(group["beta2_decay"])
    alpha = max(float(floor), float(a.store(np.asarray(np.linalg.norm(p)))) / math.sqrt(p.size)) * min(lr, step**-0.5)
    p = a.store(p * a.scalar(1 - lr * decay)) if decay else p
    if g.ndim > 1:
        moments = {}
        for kind, axis in (("row_var", -1), ("col_var", -2)):
            mean = a.store(np.square(a.store(np.linalg.norm(g, axis=axis, keepdims=True))))
            mean = a.store(mean / g.shape[axis])
            moments[kind] = a.store(_lerp(before.get(kind, np.zeros_like(mean)), mean, weight, a))
        row, column = moments["row_var"], moments["col_var"]
        mean_row = np.maximum(a.store(row.mean(-2, keepdims=True)), least)
        v = a.store(a.store(row @ column) / mean_row)
    else:
        v = a.store(_lerp(before.get("variance", np.zeros_like(g)), a.store(g * g), weight, a))
        moments = {"variance": v}
    u = a.store(a.store(1 / np.sqrt(np.maximum(v, least * least))) * g)
    clip = max(1.0, float(a.store(np.asarray(np.linalg.norm(u)))) / (math.sqrt(u.size) * float(group["d"])))
    kinds = dict.fromkeys((*moments, "update"), OF_SUMS)
    return Updated(a.store(p - a.scalar(alpha / clip) * u), moments, kinds)


def torchao_adamw(
    p: np.ndarray, g: np.ndarray, before: State, step: int, group: Mapping[str, Any], a: Arithmetic
) -> Updated:
    """Return the update of torchao's 8-bit Adam or AdamW: FP32 arithmetic, moments in 8-bit codes with a scale a block.

    The update uses the moments before they are quantised. The group has `is_adamw` and `block_size`. Arrays are float64
    of one shape. Raises UserError for FP64 weights.
    """
    refuse_fp64(a, "torchao computes in FP32")
    s = a.scalar
    lr, (beta1, beta2), decay = s(float(group["lr"])), map(float, group["betas"]), float(group["weight_decay"])
    if group["is_adamw"]:
        p = a.compute(p - a.compute(s(lr * s(decay)) * p))
    elif decay:
        g = a.compute(g + a.compute(s(decay) * p))
    first, second = (s(1 - s(s(beta) ** step)) for beta in (beta1, beta2))
    zeros = np.zeros_like(p)
    m, v = before.get("exp_avg", zeros), before.get("exp_avg_sq", zeros)
    m = a.compute(_lerp(m, g, 1 - beta1, a))
    v = a.compute(_lerp(v, a.compute(g * g), 1 - beta2, a))
    moments, largest = {"exp_avg": m, "exp_avg_sq": v}, v
    if group.get("amsgrad"):
        largest = moments["max_exp_avg_sq"] = np.maximum(before.get("max_exp_avg_sq", zeros), v)
    with np.errstate(divide="ignore", invalid="ignore"):
        root = a.compute(a.compute(np.sqrt(largest)) / s(second**0.5))
        move = a.compute(a.compute(lr * a.compute(m / first)) / a.compute(root + s(group["eps"])))
    coded = bool(group["in_codes"])
    kept = {kind: _torchao_codes(x, kind, group, a) if coded else a.store(x) for kind, x in moments.items()}
    return Updated(a.store(p - move), kept, _kinds("adamw8bit", moments) if coded else {})


def _torchao_codes(x: np.ndarray, kind: str, group: Mapping[str, Any], a: Arithmetic) -> np.ndarray:
    """Round a moment to the nearest number of its 8-bit code; a tie goes to the larger one."""
    if a is EXACT:
        return x
    levels = quantisation_map(kind == "exp_avg").astype(np.float64)
    blocks = x.reshape(-1, int(group["block_size"]))
    scale = np.maximum(np.abs(blocks).max(1, keepdims=True), fp32(np.asarray(LEAST_SCALE)))
    scaled = fp32(blocks / scale)
    below = np.clip(np.searchsorted(levels, scaled, side="right") - 1, 0, 255)
    above = np.minimum(below + 1, 255)
    nearer = fp32(scaled - levels[below]) >= fp32(fp32(levels[above] - levels[below]) * 0.5)
    return fp32(levels[np.where(nearer, above, below)] * scale).reshape(x.shape)


def bitsandbytes_adamw(
    p: np.ndarray, g: np.ndarray, before: State, step: int, group: Mapping[str, Any], a: Arithmetic
) -> Updated:
    """Return the update of bitsandbytes' AdamW on the CPU, with moments in FP32, or in 8-bit codes if `in_codes`.

        m ← (1 − β₁)·g + β₁·m      v ← (1 − β₂)·g·g + β₂·v      p ← p·(1 − lr·λ)
        p ← p − lr/c₁·m / (√v/c₂ + ε), or with FP32 moments p ← p − lr·c₂/c₁·(m / (√v + ε·c₂))

    c₁ = 1 − β₁ᵗ and c₂ = √(1 − β₂ᵗ) in FP64. Twin: jax_backend/kernels/bitsandbytes_adamw.py, which lists the sources.
    Arrays are float64 of one shape. Raises UserError for FP64 weights.
    """
    refuse_fp64(a, "bitsandbytes computes in FP32")
    s = a.scalar
    lr, (beta1, beta2), decay = float(group["lr"]), map(float, group["betas"][:2]), float(group["weight_decay"])
    zeros = np.zeros_like(p)
    m, v = before.get("state1", zeros), before.get("state2", zeros)
    m = a.compute(s(1 - beta1) * g + a.compute(m * s(beta1)))
    v = a.compute(a.compute(s(1 - beta2) * g) * g + a.compute(v * s(beta2)))
    first, second = 1 - beta1**step, math.sqrt(1 - beta2**step)
    kept, root = a.compute(p * s(1 - lr * decay)), a.compute(np.sqrt(v))
    with np.errstate(divide="ignore", invalid="ignore"):
        if not group["in_codes"]:
            ratio = a.compute(m / a.compute(root + s(group["eps"] * second)))
            return Updated(a.store(s(-lr * second / first) * ratio + kept), {"state1": m, "state2": v}, _BITSANDBYTES)
        denominator = a.compute(a.compute(root / s(second)) + s(group["eps"]))
        move = a.compute(a.compute(s(-lr / first) * m) / denominator)
    moments = {"state1": m, "state2": v}
    if a is not EXACT:
        moments = {kind: _bitsandbytes_codes(x, kind == "state1") for kind, x in moments.items()}
    kinds = {"state1": "adamw8bit_bnb/exp_avg", "state2": "adamw8bit_bnb/exp_avg_sq", "update": "adamw8bit_bnb/update"}
    return Updated(a.store(kept + move), moments, kinds)


_BITSANDBYTES = {"state1": "exp_avg", "state2": "exp_avg_sq"}


def _bitsandbytes_codes(x: np.ndarray, signed: bool) -> np.ndarray:
    """Round a moment as the CPU's quantiser does: to the map's number that is nearest to one of 65,536 equal parts."""
    flat = x.reshape(-1)
    blocks = np.pad(flat, (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    scale = np.abs(blocks).max(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(scale > 0, fp32(blocks * fp32(1 / scale)), 0.0)
    place = fp32(fp32(fp32(scaled + 1) * (PARTS - 1) / 2) + 0.5)
    parts = np.clip(np.floor(place), 0, PARTS - 1).astype(np.int64)
    return fp32(_levels_of_parts(signed)[parts] * scale).reshape(-1)[: x.size].reshape(x.shape)


@cache
def _levels_of_parts(signed: bool) -> np.ndarray:
    """Return the number of the map that is nearest to each part, with FP32 arithmetic: (65536,) float64."""
    levels, single = quantisation_map(signed), np.float32
    places = single(2) * np.arange(PARTS, dtype=single) / single(PARTS - 1) - single(1)
    return levels[np.searchsorted((levels[1:] + levels[:-1]) / single(2), places)].astype(np.float64)


def _kinds(bounds: str, moments: Mapping[str, Any]) -> dict[str, str]:
    """Map 8-bit moments and the update to their kinds of bounds. `max_exp_avg_sq` has those of `exp_avg_sq`."""
    found = {kind: f"{bounds}/{kind.removeprefix('max_')}" for kind in moments}
    return {**found, "update": f"{bounds}/update"}


RULES: dict[str, Rule] = {"adamw": adamw, "adam": adam_l2, "sgd": sgd, "muon": muon, "adafactor": adafactor}


def rule_of(optimizer: Any) -> Rule | None:
    """Return the rule of an optimizer of torch, torchao or bitsandbytes; None for any other.

    Subclasses have no rule, because they may compute something else. bitsandbytes on CUDA and stochastic rounding have
    none, because no twin computes as they do.
    """
    kind = type(optimizer)
    name = kind.__name__
    if f"{kind.__module__}.".startswith("torch.optim."):
        return RULES.get(name.lower())
    if kind.__module__.startswith("torchao.") and name in ("Adam8bit", "AdamW8bit"):
        return None if optimizer.bf16_stochastic_round else torchao_adamw
    if kind.__module__.startswith("bitsandbytes.") and name in ("AdamW", "AdamW8bit", "AdamW32bit"):
        plain = not optimizer.args.max_unorm and not optimizer.args.skip_zeros
        on_cpu = all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])
        return bitsandbytes_adamw if plain and on_cpu else None
    return None
