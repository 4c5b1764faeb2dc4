"""Precision policies, and the matrix products whose casts are the policy. Twin: torch_backend/precision.py.

Arrays stay in the *stream* dtype; where the policy casts to a narrower operand dtype, values are rounded to it in
place (jax_backend/kernels/formats.py). A product of two bf16 values is exact in FP32, so an FP32 product of rounded
operands is a bf16 product with FP32 accumulation; of two FP16 or TF32 values, likewise. The twin rounds where torch
rounds.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from lockstep.core.backend import NotSupported
from lockstep.core.components import precision
from lockstep.jax_backend.kernels.float8 import Float8, delayed_product, product
from lockstep.jax_backend.kernels.formats import BF16, FP16, TF32
from lockstep.jax_backend.policy import Policy

# By the name of core/components/precision.py: dtypes of streams, and formats that operands are rounded to.
STREAMS = {"fp64": jnp.float64, "fp32": jnp.float32}
OPERANDS = {"tf32": TF32, "bf16": BF16, "fp16": FP16}


def _twin(policy: precision.PrecisionPolicy) -> Policy:
    operand = OPERANDS[policy.operand] if policy.rounds else None
    return Policy(policy.name, STREAMS[policy.stream], operand, narrow_output=not policy.on_tensor_cores)


POLICIES = {name: _twin(policy) for name, policy in precision.POLICIES.items()}


def linear(
    x: Array,
    weight: Array,
    bias: Array | None,
    policy: Policy,
    float8: Float8 | None = None,
    amax: Array | None = None,
) -> Array:
    """Project x (…, in) by weight (out, in) → (…, out).

    The output, to which the bias is added, is in the stream dtype unless the plan of casts sets another.

    float8: makes the product in FP8 (jax_backend/kernels/float8.py), under a policy whose operands are bf16: a layer
    in FP8 is so under the run's own policy, and `evaluate` may ask for another one. amax: of delayed scaling, as
    `delayed_product` takes it. Raises NotSupported for a layer with delayed scaling that is given none.
    """
    if float8 == "delayed" and policy.operand == BF16:
        if amax is None:
            raise NotSupported("FP8's delayed scaling of a whole model; JAX runs its stages one at a time")
        y = delayed_product(x, weight, amax, policy)
    elif float8 is not None and policy.operand == BF16:
        y = product(x, weight, policy, float8)
    elif bias is not None and policy.casts.rounds("bias"):
        return _with_bias(x, weight, bias, policy)
    else:
        y = _product(x, weight, policy, True)
    return y if bias is None else policy.kept(y + bias, "linear")


def head(x_BSD: Array, weight_VD: Array, policy: Policy) -> Array:
    """Return logits (B, S, V) in the stream dtype: operands rounded to the operand dtype, output not rounded.

    Nor is the weight's gradient, which is summed chunk by chunk in the stream dtype. Under a plan that rounds logits
    both are rounded.
    """
    return _product(x_BSD, weight_VD, policy, policy.casts.rounds("logits"))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x: Array, weight: Array, policy: Policy, round_output: bool) -> Array:
    y = jnp.einsum("...i,oi->...o", policy.round(x), policy.round(weight))
    return policy.round_output(y) if round_output else y


def _product_forward(x: Array, weight: Array, policy: Policy, round_output: bool) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, weight, policy, round_output), (policy.round(x), policy.round(weight))


def _product_backward(
    policy: Policy, round_output: bool, saved: tuple[Array, Array], grad: Array
) -> tuple[Array, Array]:
    x, weight = saved
    grad = policy.round(grad)
    grad_x = policy.round_output(jnp.einsum("...o,oi->...i", grad, weight))
    grad_weight = jnp.einsum("...o,...i->oi", grad, x)
    return grad_x, policy.round_output(grad_weight) if round_output else grad_weight


_product.defvjp(_product_forward, _product_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _with_bias(x: Array, weight: Array, bias: Array, policy: Policy) -> Array:
    """Compute the product and a rounded bias, with one rounding of their sum."""
    return policy.round(jnp.einsum("...i,oi->...o", policy.round(x), policy.round(weight)) + policy.round(bias))


def _with_bias_forward(x: Array, weight: Array, bias: Array, policy: Policy) -> tuple[Array, tuple[Array, Array]]:
    return _with_bias(x, weight, bias, policy), (policy.round(x), policy.round(weight))


def _with_bias_backward(policy: Policy, saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array, Array]:
    grad_bias = policy.round(grad).sum(tuple(range(grad.ndim - 1)))
    return *_product_backward(policy, True, saved, grad), policy.round(grad_bias)


_with_bias.defvjp(_with_bias_forward, _with_bias_backward)
