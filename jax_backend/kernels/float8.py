"""Linear layers in FP8, cast for cast as torchao makes them. Twin: torch_backend/kernels/float8.py.

A scale maps the largest magnitude of its group to the format's largest number. Tensorwise (one scale a tensor): inputs
and weights in e4m3, gradients in e5m2. Rowwise (one scale a row of the left operand and a column of the right one, cut
down to a power of two): e4m3 throughout. Delayed: as tensorwise, with scales that the steps before have made
(core/train/fp8_amax.py). Values stay in the stream dtype, rounded in place; a product of two FP8 values
is exact in FP32. Weights are cast from the stream dtype, all else from bf16; outputs are rounded to bf16.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from lockstep.core.config.schema import RunConfig
from lockstep.core.model.names import fp8_modules
from lockstep.jax_backend.kernels.formats import E4M3, E5M2, Format, rounded
from lockstep.jax_backend.policy import Policy

# The recipe of a layer: the numbers that share a scale.
Float8 = Literal["tensorwise", "rowwise", "delayed"]
# torchao's least magnitude of a group (float8_utils.EPS).
LEAST = 1e-12


def cast(x: Array, axis: int, form: Format, recipe: Float8, amax: Array | None = None) -> Array:
    """Round x (M, N) as FP8 does: scale, round, scale back; rowwise, the numbers along `axis` share a scale.

    amax: the scale is made from this scalar instead.

    amax: of which the scale is made instead, a scalar.
    """
    magnitude = jnp.max(jnp.abs(x), axis=axis if recipe == "rowwise" else None, keepdims=True)
    magnitude = magnitude if amax is None else jnp.full_like(magnitude, amax)
    scale = (form.largest / jnp.maximum(magnitude.astype(jnp.float64), LEAST)).astype(jnp.float32)
    if recipe == "rowwise":
        # JAX computes exp2 and log2 of FP32 from exp and ln, which are not exact at powers of two.
        power = jnp.floor(jnp.log2(scale.astype(jnp.float64)).astype(jnp.float32))
        scale = jnp.ldexp(jnp.ones_like(scale), power.astype(jnp.int32))
    scaled = jnp.clip(x.astype(jnp.float32) * scale, -form.largest, form.largest)
    return (rounded(scaled, form) / scale).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def product(x: Array, weight: Array, policy: Policy, recipe: Float8) -> Array:
    """Multiply x (…, in) by weight (out, in) → (…, out) in the stream dtype."""
    return _forward(x, weight, policy, recipe)[0]


def _forward(x: Array, weight: Array, policy: Policy, recipe: Float8) -> tuple[Array, tuple[Array, Array]]:
    flat = policy.round(x).reshape(-1, x.shape[-1])
    y = cast(flat, -1, E4M3, recipe) @ cast(weight, -1, E4M3, recipe).T
    return policy.round(y).reshape(*x.shape[:-1], -1), (policy.round(x), weight)


def _backward(policy: Policy, recipe: Float8, saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, weight = saved
    form = E5M2 if recipe == "tensorwise" else E4M3
    flat, grad = x.reshape(-1, x.shape[-1]), policy.round(grad).reshape(-1, grad.shape[-1])
    grad_x = cast(grad, -1, form, recipe) @ cast(weight, 0, E4M3, recipe)
    grad_weight = cast(grad, 0, form, recipe).T @ cast(flat, 0, E4M3, recipe)
    return policy.round(grad_x).reshape(x.shape), policy.round(grad_weight)


product.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def delayed_product(x: Array, weight: Array, amax: Array, policy: Policy) -> Array:
    """Compute the product with the scales of given amaxes (3,): of input, weight and output gradient.

    The gradient of `amax` is the three largest magnitudes that were seen instead.
    """
    return _delayed_forward(x, weight, amax, policy)[0]


def _delayed_forward(x: Array, weight: Array, amax: Array, policy: Policy) -> tuple[Array, tuple[Array, Array, Array]]:
    flat = policy.round(x).reshape(-1, x.shape[-1])
    y = cast(flat, -1, E4M3, "delayed", amax[0]) @ cast(weight, -1, E4M3, "delayed", amax[1]).T
    return policy.round(y).reshape(*x.shape[:-1], -1), (policy.round(x), weight, amax)


def _delayed_backward(policy: Policy, saved: tuple[Array, Array, Array], grad: Array) -> tuple[Array, Array, Array]:
    x, weight, amax = saved
    flat, grad = x.reshape(-1, x.shape[-1]), policy.round(grad).reshape(-1, grad.shape[-1])
    narrow = cast(grad, -1, E5M2, "delayed", amax[2])
    grad_x = narrow @ cast(weight, 0, E4M3, "delayed", amax[1])
    grad_weight = narrow.T @ cast(flat, 0, E4M3, "delayed", amax[0])
    seen = jnp.stack([jnp.max(jnp.abs(one)) for one in (flat, weight, grad)]).astype(amax.dtype)
    return policy.round(grad_x).reshape(x.shape), policy.round(grad_weight), seen


delayed_product.defvjp(_delayed_forward, _delayed_backward)


def apply_float8(model: nnx.Module, run: RunConfig) -> None:
    """Make the products of the linear layers that the run chooses (`precision.fp8_layers`) in FP8."""
    modules: dict[str, Any] = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    for name in fp8_modules(run):
        modules[name].float8 = run.precision.fp8
