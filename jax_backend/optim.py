"""AdamW with decoupled decay by group, from optax's moments, rounding in torch's order. Twin: torch_backend/optim.py.

Plain `optax.adamw` adds −lr·(m̂/(√v̂ + ε) + λ·p) in one sum and corrects the bias in FP32; torch corrects in FP64
scalars, first rounds p·(1 − lr·λ), and then takes the step::

    m ← β₁·m + (1 − β₁)·g                    v ← β₂·v + (1 − β₂)·g²
    p ← p·(1 − lr·λ)
    p ← p + (−lr/(1 − β₁ᵗ) · m) / (√v / √(1 − β₂ᵗ) + ε)

The function is that of `optax.adamw` (a test pins it in FP64); only the order of roundings is torch's.
"""

from __future__ import annotations

import jax.numpy as jnp
import optax
from jax import Array

from core.config import OptimConfig
from core.names import group_of

Tree = dict[str, Array]


def decay_of_group(optim: OptimConfig, group: str) -> float:
    """Weight decay λ of a parameter group."""
    return optim.weight_decay if group == "matrices" else 0.0


def update_moments(optim: OptimConfig, grads: Tree, exp_avg: Tree, exp_avg_sq: Tree) -> tuple[Tree, Tree]:
    """First and second moments after `grads` (Kingma & Ba 2015)."""
    return (
        optax.tree.update_moment(grads, exp_avg, optim.beta1, 1),
        optax.tree.update_moment(grads, exp_avg_sq, optim.beta2, 2),
    )


def global_norm(grads: Tree) -> Array:
    """L2 norm over all gradients, a float64 scalar, accumulated in FP64."""
    return jnp.linalg.norm(jnp.stack([jnp.linalg.norm(g.ravel().astype(jnp.float64)) for g in grads.values()]))


def clip_coefficient(optim: OptimConfig, norm: Array) -> Array:
    """min(1, limit / (norm + 1e-6)), the 1e-6 as in `torch.nn.utils.clip_grad_norm_`; 1 where clipping is off."""
    if not optim.clip_norm:
        return jnp.ones_like(norm)
    return jnp.minimum(optim.clip_norm / (norm + jnp.asarray(1e-6, norm.dtype)), 1.0)


def decayed_and_move(
    optim: OptimConfig, params: Tree, exp_avg: Tree, exp_avg_sq: Tree, step: Array, lr: Array
) -> tuple[Tree, Tree]:
    """p·(1 − lr·λ) and the step to add to it, from updated moments; `step` counts from 1.

    `lr` is a float64 scalar, as torch's Python float is. The two are added in a program of their own: inside one, XLA
    contracts product and sum into a fused multiply-add, which torch does not do, and a quarter of the new weights
    differ in their last bit.
    """
    one = jnp.asarray(1.0, jnp.float64)
    correction, root = (
        one - optim.beta1 ** step.astype(one.dtype),
        jnp.sqrt(one - optim.beta2 ** step.astype(one.dtype)),
    )
    kept, move = {}, {}
    for name, p in params.items():
        denominator = jnp.sqrt(exp_avg_sq[name]) / root.astype(p.dtype) + jnp.asarray(optim.eps, p.dtype)
        kept[name] = p * (one - lr * decay_of_group(optim, group_of(name))).astype(p.dtype)
        move[name] = (-lr / correction).astype(p.dtype) * exp_avg[name] / denominator
    return kept, move
