"""Precision policies, and the matrix products whose casts are the policy. Twin: torch_backend/precision.py.

Arrays stay in the *stream* dtype; where the policy casts to a narrower operand dtype, values are rounded to it in
place by `lax.reduce_precision`, which XLA may not remove (it may drop a pair of converts). A product of two bf16
values is exact in FP32, so an FP32 product of rounded operands is a bf16 product with FP32 accumulation. The twin
rounds where torch rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

Kernel = Literal["cpu", "cuda", "math"]


@dataclass(frozen=True)
class Policy:
    """stream: dtype of every array. operand_bits: exponent and mantissa bits of matrix operands, or None.

    kernel: whose roundings attention follows: torch's fused kernels on the CPU or on CUDA, or `math`
            (jax_backend/attention.py).
    """

    name: str
    stream: Any
    operand_bits: tuple[int, int] | None
    kernel: Kernel = "cpu"

    def round(self, x: Array) -> Array:
        """X with its values rounded, to nearest even, to the operand format."""
        return x if self.operand_bits is None else lax.reduce_precision(x, *self.operand_bits)


POLICIES = {
    "fp64": Policy("fp64", jnp.float64, None),
    "fp32": Policy("fp32", jnp.float32, None),
    "bf16": Policy("bf16", jnp.float32, (8, 7)),
}


def linear(x: Array, weight: Array, bias: Array | None, policy: Policy) -> Array:
    """X (…, in), weight (out, in) → (…, out) in the stream dtype; the bias is added in the stream dtype."""
    y = _product(x, weight, policy, True)
    return y if bias is None else y + bias


def head(x_BSD: Array, weight_VD: Array, policy: Policy) -> Array:
    """Logits (B, S, V) in the stream dtype: operands rounded to the operand dtype, output not rounded."""
    return _product(x_BSD, weight_VD, policy, False)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x: Array, weight: Array, policy: Policy, round_output: bool) -> Array:
    y = jnp.einsum("...i,oi->...o", policy.round(x), policy.round(weight))
    return policy.round(y) if round_output else y


def _product_forward(x: Array, weight: Array, policy: Policy, round_output: bool) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, weight, policy, round_output), (policy.round(x), policy.round(weight))


def _product_backward(
    policy: Policy, round_output: bool, saved: tuple[Array, Array], grad: Array
) -> tuple[Array, Array]:
    x, weight = saved
    grad = policy.round(grad)
    grad_x = policy.round(jnp.einsum("...o,oi->...i", grad, weight))
    grad_weight = policy.round(jnp.einsum("...o,...i->oi", grad, x))
    return grad_x, grad_weight


_product.defvjp(_product_forward, _product_backward)
