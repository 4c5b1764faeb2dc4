"""AdamW, AdamW with 8-bit moments and Muon, rounding in torch's order. Twin: torch_backend/optim.py, with the formulas.

Plain `optax.adamw` adds −lr·(m̂/(√v̂ + ε) + λ·p) in one sum and corrects the bias in FP32; torch corrects in FP64
scalars, first rounds p·(1 − lr·λ), and then takes the step::

    m ← β₁·m + (1 − β₁)·g                    v ← β₂·v + (1 − β₂)·g²
    p ← p·(1 − lr·λ)
    p ← p + (−lr/(1 − β₁ᵗ) · m) / (√v / √(1 − β₂ᵗ) + ε)

The function is that of `optax.adamw` (a test pins it in FP64); only the order of roundings is torch's.

Every update is a sum of terms, p·(1 − lr·λ) and the step. They are added in a program of their own: inside one, XLA
contracts product and sum into a fused multiply-add, which torch does not do, and a quarter of the new weights differ in
their last bit.

In FP64, and so for the truth, nothing is rounded to a narrower format: moments keep all their bits, Newton–Schulz is
the exact polynomial. The twin's error is then what 8-bit moments and `ns_dtype` honestly cost in this one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import optax
from jax import Array, lax

from lockstep.core.components.optimizers import ADAMW
from lockstep.core.config.schema import OptimConfig, RunConfig
from lockstep.core.model.groups import group_settings, update_rules
from lockstep.core.model.names import groups_of
from lockstep.jax_backend.kernels.bitsandbytes_adamw import next_of_bitsandbytes
from lockstep.jax_backend.kernels.codes import in_codes

Tree = dict[str, Array]
Terms = dict[str, tuple[Array, ...]]

# Newton–Schulz iteration: the coefficients of the quintic, and the smallest divisor of X (Jordan 2024).
A, B, C, LEAST_NORM = 3.4445, -4.7750, 2.0315, 1e-7


def next_state(
    config: RunConfig,
    params: Tree,
    moments: dict[str, Tree],
    grads: Tree,
    step: Array,
    lr: Array,
    adam_in_fp32: bool = False,
) -> tuple[Terms, dict[str, Tree]]:
    """Compute the terms of each new weight, to be added from left to right, and the new moments by kind.

    `step` counts from 1. `lr` is the schedule's rate, a float64 scalar, as torch's Python float is. adam_in_fp32: as
    `StepRecord` has it (core/backend.py).
    """
    optim = config.optim
    groups, rules = groups_of(config.model), update_rules(config)
    terms: Terms = {}
    after: dict[str, Tree] = {kind: {} for kind in moments}
    for name, p in params.items():
        settings, rule = group_settings(config, groups[name]), rules[name]
        rate, decay = lr * settings.lr_factor, settings.weight_decay
        old = {kind: moments[kind][name] for kind in rule.moments}
        compute = _adamw_in_fp32 if adam_in_fp32 and rule is ADAMW else RULES[rule.name]
        terms[name], new = compute(optim, p, grads[name], old, step, rate, decay)
        for kind, moment in new.items():
            after[kind][name] = moment
    return terms, after


def _adamw(
    optim: OptimConfig, p: Array, grad: Array, old: Tree, step: Array, lr: Array, decay: float
) -> tuple[tuple[Array, ...], Tree]:
    m, v = update_moments(optim, grad, old["exp_avg"], old["exp_avg_sq"])
    return adamw_terms(optim, p, m, v, step, lr, decay), {"exp_avg": m, "exp_avg_sq": v}


def _adamw_in_fp32(
    optim: OptimConfig, p: Array, grad: Array, old: Tree, step: Array, lr: Array, decay: float
) -> tuple[tuple[Array, ...], Tree]:
    """Update as torch's fused AdamW on CUDA: FP32 hyperparameters, and a fused multiply-add is one rounding.

    Each is a sum in FP64 that is then rounded. In FP64 there is nothing to round, but β stays what it is in FP32.
    core/parity/watch/update_rules.py has the formulas and their source.
    """
    stream, double, single = p.dtype, jnp.float64, jnp.float32
    beta1, beta2 = (jnp.asarray(beta, single).astype(double) for beta in (optim.beta1, optim.beta2))

    def fused(x: Array) -> Array:
        return x.astype(stream)

    def corrected(beta: Array) -> Array:
        return 1 - fused(beta ** step.astype(double))

    rate, square = lr.astype(stream), jnp.square(grad)
    m = fused(beta1 * old["exp_avg"] + fused(grad - beta1 * grad))
    v = fused(beta2 * old["exp_avg_sq"] + fused(square - beta2 * square))
    shrunk = fused(p - (rate * jnp.asarray(decay, stream)).astype(double) * p)
    denominator = jnp.sqrt(v) / jnp.sqrt(corrected(beta2)) + jnp.asarray(optim.eps, stream)
    return (shrunk, -(rate / corrected(beta1) * m / denominator)), {"exp_avg": m, "exp_avg_sq": v}


def _torchao(
    optim: OptimConfig, p: Array, grad: Array, old: Tree, step: Array, lr: Array, decay: float
) -> tuple[tuple[Array, ...], Tree]:
    terms, m, v = torchao_terms(optim, p, grad, old["exp_avg"], old["exp_avg_sq"], step, lr, decay)
    return terms, {"exp_avg": m, "exp_avg_sq": v}


def _torchao_8bit(
    optim: OptimConfig, p: Array, grad: Array, old: Tree, step: Array, lr: Array, decay: float
) -> tuple[tuple[Array, ...], Tree]:
    terms, new = _torchao(optim, p, grad, old, step, lr, decay)
    m, v = in_codes(new["exp_avg"], signed=True), in_codes(new["exp_avg_sq"], signed=False)
    return terms, {"exp_avg": m, "exp_avg_sq": v}


def _bitsandbytes(
    narrow: bool, optim: OptimConfig, p: Array, grad: Array, old: Tree, step: Array, lr: Array, decay: float
) -> tuple[tuple[Array, ...], Tree]:
    before = old["exp_avg"], old["exp_avg_sq"]
    terms, m, v = next_of_bitsandbytes(optim, p, grad, before, step, lr, decay, narrow)
    return terms, {"exp_avg": m, "exp_avg_sq": v}


def _muon(
    optim: OptimConfig, p: Array, grad: Array, old: Tree, step: Array, lr: Array, decay: float
) -> tuple[tuple[Array, ...], Tree]:
    buffer = momentum_after(optim, grad, old["momentum_buffer"])
    return muon_terms(optim, p, grad, buffer, lr, decay), {"momentum_buffer": buffer}


# Rule of core/components/optimizers.py → function of settings, weight, gradient, moments, step, rate and decay, that
# gives the terms of the new weight, and the new moments by kind.
RULES: dict[str, Callable[..., tuple[tuple[Array, ...], Tree]]] = {
    "adamw": _adamw,
    "adamw_torchao": _torchao,
    "adamw_bitsandbytes": partial(_bitsandbytes, False),
    "adamw8bit_torchao": _torchao_8bit,
    "adamw8bit_bitsandbytes": partial(_bitsandbytes, True),
    "muon": _muon,
}


def _adamw_in_words(config: RunConfig) -> str:
    return "optax.scale_by_adam"


def _adamw8bit_in_words(config: RunConfig) -> str:
    codes = f"AdamW, moments through {config.optim.eight_bit}'s 8-bit codes"
    return _adamw_in_words(config) if config.precision.exact else codes


def _muon_in_words(config: RunConfig) -> str:
    dtype = "fp64" if config.precision.exact else config.optim.ns_dtype
    return f"Muon (Newton–Schulz in {dtype}), {_adamw_in_words(config)}"


# Optimizer of core/components/optimizers.py → what computes it, for the table at start.
WORDS: dict[str, Callable[[RunConfig], str]] = {
    "adamw": _adamw_in_words,
    "adamw8bit": _adamw8bit_in_words,
    "muon": _muon_in_words,
}


def update_moments(optim: OptimConfig, grad: Array, exp_avg: Array, exp_avg_sq: Array) -> tuple[Array, Array]:
    """Return the first and second moments after `grad` (Kingma & Ba 2015)."""
    return (
        optax.tree.update_moment(grad, exp_avg, optim.beta1, 1),
        optax.tree.update_moment(grad, exp_avg_sq, optim.beta2, 2),
    )


def adamw_terms(
    optim: OptimConfig, p: Array, exp_avg: Array, exp_avg_sq: Array, step: Array, lr: Array, decay: float
) -> tuple[Array, Array]:
    """Return p·(1 − lr·λ) and the step to add to it, from updated moments."""
    one = jnp.asarray(1.0, jnp.float64)
    correction, root = (
        one - optim.beta1 ** step.astype(one.dtype),
        jnp.sqrt(one - optim.beta2 ** step.astype(one.dtype)),
    )
    denominator = jnp.sqrt(exp_avg_sq) / root.astype(p.dtype) + jnp.asarray(optim.eps, p.dtype)
    return p * (one - lr * decay).astype(p.dtype), (-lr / correction).astype(p.dtype) * exp_avg / denominator


def torchao_terms(
    optim: OptimConfig, p: Array, grad: Array, exp_avg: Array, exp_avg_sq: Array, step: Array, lr: Array, decay: float
) -> tuple[tuple[Array, Array, Array], Array, Array]:
    """Return torchao's AdamW in FP32: p, −(lr·λ)·p and the step; and the moments before they are rounded to 8 bits.

    The powers of β are taken in FP64 of what β is in FP32, and rounded: FP32's own power is rarely another number.
    """
    single, double = jnp.float32, jnp.float64

    def correction(beta: float) -> Array:
        return 1 - (jnp.asarray(beta, single).astype(double) ** step.astype(double)).astype(single)

    rate, root = lr.astype(single), jnp.sqrt(correction(optim.beta2))
    m = exp_avg + jnp.asarray(1 - optim.beta1, single) * (grad - exp_avg)
    v = exp_avg_sq + jnp.asarray(1 - optim.beta2, single) * (jnp.square(grad) - exp_avg_sq)
    move = rate * (m / correction(optim.beta1)) / (jnp.sqrt(v) / root + jnp.asarray(optim.eps, single))
    return (p, -(rate * jnp.asarray(decay, single) * p), -move), m, v


def momentum_after(optim: OptimConfig, grad: Array, buffer: Array) -> Array:
    """Return Muon's momentum, an average of gradients, in the order of `torch.lerp`."""
    return buffer + (1 - optim.momentum) * (grad - buffer)


def muon_terms(
    optim: OptimConfig, p: Array, grad: Array, buffer: Array, lr: Array, decay: float
) -> tuple[Array, Array]:
    """Return p·(1 − lr·λ) of a matrix and the step to add to it, from the updated momentum."""
    update = buffer
    if optim.nesterov:  # `torch.lerp` starts from the nearer end
        near, weight = (grad, optim.momentum) if optim.momentum < 0.5 else (buffer, optim.momentum - 1)
        update = near + weight * (buffer - grad)
    made = orthogonal(update, optim.ns_steps, optim.ns_dtype if p.dtype == jnp.float32 else None)
    adjusted = -lr * (0.2 * math.sqrt(max(p.shape)))
    return p * (1.0 - lr * decay).astype(p.dtype), adjusted.astype(p.dtype) * made


def orthogonal(x: Array, steps: int, dtype: str | None) -> Array:
    """Move the singular values of x (rows, columns) near 1, by Newton–Schulz.

    dtype: `bf16` rounds the operands and results of every product, the sum that goes with it included, and of the
    quotient by the norm, where torch has bf16 tensors; else they are of the dtype of `x`.
    """

    def rounded(value: Array) -> Array:
        return lax.reduce_precision(value, 8, 7) if dtype == "bf16" else value

    tall = x.shape[0] > x.shape[1]
    x = rounded(x.T if tall else x)
    x = rounded(x / jnp.maximum(jnp.linalg.norm(x), jnp.asarray(LEAST_NORM, x.dtype)))
    for _ in range(steps):
        gram = rounded(x @ x.T)
        x = rounded(A * x + rounded(B * gram + C * (gram @ gram)) @ x)
    return x.T if tall else x


def in_words(config: RunConfig) -> str:
    """Describe `next_state`, for the table at start."""
    return WORDS[config.optim.name](config)


def global_norm(grads: Tree) -> Array:
    """Return the L2 norm over all gradients, a float64 scalar, accumulated in FP64."""
    return jnp.linalg.norm(jnp.stack([jnp.linalg.norm(g.ravel().astype(jnp.float64)) for g in grads.values()]))


def clip_coefficient(optim: OptimConfig, norm: Array) -> Array:
    """Return min(1, limit / (norm + 1e-6)), with 1e-6 as in `torch.nn.utils.clip_grad_norm_`; 1 without clipping."""
    if not optim.clip_norm:
        return jnp.ones_like(norm)
    return jnp.minimum(optim.clip_norm / (norm + jnp.asarray(1e-6, norm.dtype)), 1.0)
