"""Precision policies, and the matrix products that apply their casts. Twin: jax_backend/precision.py.

Weights, residual stream, norms, RoPE, softmax and loss have the *stream* dtype. A matrix product casts its operands to
the *operand* dtype, accumulates in FP32 or wider, and rounds its output to the operand dtype. The head is an exception:
its logits have the stream dtype. The plan of casts (`precision.casts`) adds other roundings: it lists the tensors that
are kept in the operand dtype.

Backward casts under bf16: the gradient of a product's output is rounded to bf16 before both backward products. Their
results are rounded to bf16 and then cast to FP32. For `linear`, autograd derives this from the casts. `head` has a
backward formula of its own: the gradient of its weight, a sum over all tokens, is not rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.core.components import precision
from lockstep.core.components.cast_plan import LOCKSTEP, CastPlan
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError

if TYPE_CHECKING:
    from lockstep.torch_backend.kernels.float8 import Float8


@dataclass(frozen=True)
class Policy:
    """A precision policy in torch's dtypes.

    stream: dtype of all tensors except operands of products. operand: dtype of both operands of a matrix product.
    onednn: compute FP32 products on the CPU with oneDNN, which sums in another order than torch's BLAS. casts: the plan
    of casts, which other tensors are rounded to the operand dtype.
    """

    name: str
    stream: torch.dtype
    operand: torch.dtype
    onednn: bool = False
    casts: CastPlan = LOCKSTEP

    def kept(self, x: Tensor, key: str) -> Tensor:
        """Cast x to the dtype that the plan of casts sets for `key`: the operand or the stream dtype."""
        return x.to(self.operand if self.casts.keeps(key) else self.stream)

    def read(self, x: Tensor, key: str) -> Tensor:
        """Cast x to the stream dtype before an operation reads it. key: the entry of the plan that x was kept by.

        The residual stream also gets an autograd node. A norm uses its input several times, and at this node its
        gradients are summed before those of other readers are added. So the order of the sum is the same with a tap.
        """
        x = x.to(self.stream)
        return x.view_as(x) if key == "residual" else x

    def rotated(self, rotate: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply a rotation with the plan's casts of its input and its output."""
        x = self.kept(x, "rope") if self.casts.rounds("rope") else self.read(x, "linear")
        return self.kept(rotate(self.read(x, "rope") if self.casts.rotates_widely else x), "rotation")

    def tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return RoPE's tables in the stream dtype, with the plan's rounding."""
        cos, sin = cos.to(self.stream), sin.to(self.stream)
        return (cos.to(self.operand), sin.to(self.operand)) if self.casts.rotates_narrowly else (cos, sin)

    def activated(self, activate: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Apply an activation with the plan's casts of its inputs (one tensor, or gate and up) and its output."""
        if not self.casts.rounds("act"):
            return activate(*(self.read(x, "linear") for x in inputs))
        inputs = tuple(self.kept(x, "act") for x in inputs)
        if not self.casts.rounds_inside_act:
            inputs = tuple(self.read(x, "act") for x in inputs)
        return self.kept(activate(*inputs), "act")


# Dtypes by the name in core/components/precision.py. For tf32, CUDA rounds FP32 operands to TF32
# (torch_backend/switches.py). FP8 is a property of single layers and has no entry.
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
POLICIES = {
    name: Policy(name, DTYPES[policy.stream], DTYPES[policy.operand]) for name, policy in precision.POLICIES.items()
}


def policy_of(config: RunConfig) -> Policy:
    """Return the policy of a run. Raises UserError if it needs oneDNN and torch was built without it."""
    return replace(POLICIES[config.precision.policy], onednn=_by_onednn(config), casts=config.precision.plan)


def products_in_force(config: RunConfig) -> dict[str, str]:
    """Name the library of FP32 products on the CPU, for the table at start, if it is not torch's BLAS."""
    return {"FP32 products": "oneDNN"} if _by_onednn(config) else {}


def _by_onednn(config: RunConfig) -> bool:
    # A session's configuration has no `auto` that means oneDNN (core/config/auto.py); a remaining `auto` means BLAS.
    # Under bf16 the few FP32 products, those of the head, stay BLAS: the bounds were measured with it.
    asked = config.precision.cpu_products == "onednn"
    if asked and not torch.backends.mkldnn.is_available():
        raise UserError("precision.cpu_products = 'onednn': this torch was built without oneDNN; take 'blas'")
    return asked


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, policy: Policy, float8: Float8 | None = None) -> Tensor:
    """Project x (…, in) by weight (out, in) and add the bias (out,) → (…, out).

    The output has the stream dtype unless the plan of casts sets the operand dtype. float8: the FP8 recipe of the layer
    (torch_backend/kernels/float8.py). It applies only if the policy's operands are bf16; `evaluate` may use another
    policy.
    """
    x = x.to(policy.operand)
    in_float8 = float8 is not None and policy.operand == torch.bfloat16
    if bias is not None and policy.casts.rounds("bias") and not in_float8:
        return _with_bias(x, weight, bias, policy)
    if float8 is not None and in_float8:
        y = float8.product(x, weight)
    elif slow(x):
        y = F.linear(x.to(policy.stream), weight.to(policy.operand).to(policy.stream)).to(policy.operand)
    elif policy.onednn and x.dtype == torch.float32:
        y = _Linear.apply(x, weight)
    else:
        y = F.linear(x, weight.to(policy.operand))
    return policy.kept(y if bias is None else y.to(policy.stream) + bias, "linear")


def _with_bias(x: Tensor, weight: Tensor, bias: Tensor, policy: Policy) -> Tensor:
    """Compute x·Wᵀ + b with all operands in the operand dtype, and round the sum once. x has the operand dtype."""
    weight, bias = weight.to(policy.operand), bias.to(policy.operand)
    if slow(x):
        wide = F.linear(x.to(policy.stream), weight.to(policy.stream), bias.to(policy.stream))
        return policy.kept(wide.to(policy.operand), "linear")
    return policy.kept(F.linear(x, weight, bias), "linear")


def head(x_BSD: Tensor, weight_VD: Tensor, policy: Policy) -> Tensor:
    """Return logits (B, S, V): operands are rounded to the operand dtype, the output has the stream dtype.

    If the plan of casts rounds logits, they are computed like a linear layer, and have the operand dtype.
    """
    if policy.casts.rounds("logits"):
        return linear(x_BSD, weight_VD, None, policy).to(policy.operand)
    if policy.operand == policy.stream:
        return linear(x_BSD, weight_VD, None, policy)
    logits: Tensor = _Head.apply(x_BSD, weight_VD, policy.operand, policy.onednn)
    return logits


class _Linear(torch.autograd.Function):
    """The product x (…, in) · Wᵀ in FP32, forward and backward, by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return by_onednn(x.flatten(0, -2), weight.T).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        return by_onednn(grad, weight).unflatten(0, x.shape[:-1]), by_onednn(grad.T, x.flatten(0, -2))


class _Head(torch.autograd.Function):
    """The product of a head with FP32 output; the backward pass rounds the output's gradient before both products.

    Plain autograd would keep that gradient in FP32.
    """

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, weight_VD: Tensor, operand: torch.dtype, onednn: bool) -> Tensor:
        x, weight = x_BSD.to(operand), weight_VD.to(operand)
        ctx.save_for_backward(x, weight)
        ctx.of_x, ctx.stream, ctx.onednn = x_BSD.dtype, weight_VD.dtype, onednn
        return wide_product(x.flatten(0, -2), weight.T, weight_VD.dtype, onednn).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        grad_x = narrow_product(grad.flatten(0, -2), weight, ctx.stream, ctx.onednn).unflatten(0, grad.shape[:-1])
        grad_weight = wide_product(grad.flatten(0, -2).T, x.flatten(0, -2), ctx.stream, ctx.onednn)
        return grad_x.to(ctx.of_x), grad_weight, None, None


def slow(x: Tensor) -> bool:
    """Return whether products of x are computed in FP32 and then rounded: FP16 on the CPU, fifty times as slow."""
    return x.dtype == torch.float16 and not x.is_cuda


def narrow_product(left: Tensor, right: Tensor, out: torch.dtype, onednn: bool = False) -> Tensor:
    """Multiply two matrices of the operand dtype, round the product to that dtype, and cast it to `out`."""
    if slow(left) or left.dtype == out:
        return wide_product(left, right, out, onednn).to(left.dtype).to(out)
    return torch.mm(left, right).to(out)


def wide_product(left: Tensor, right: Tensor, out: torch.dtype, onednn: bool = False) -> Tensor:
    """Multiply two matrices of the operand dtype; the product has the stream dtype `out`, without another rounding."""
    if left.is_cuda and left.dtype != out:
        return torch.mm(left, right, out_dtype=out)
    # The CPU has no low-precision product with FP32 output; products of bf16 values are exact in FP32.
    product = by_onednn if onednn and out == torch.float32 else torch.mm
    return product(left.to(out), right.to(out))


def add_product(total: Tensor, left: Tensor, right: Tensor, onednn: bool = False) -> None:
    """Add the wide product of two matrices of the operand dtype to `total`, of the stream dtype, in place.

    On CUDA the product adds to `total` as it writes (cuBLAS, beta = 1), with the roundings of a separate product and
    sum. On the CPU the product is computed first.
    """
    if left.is_cuda and left.dtype != total.dtype:
        _add_product(total, left, right)
    else:
        total += wide_product(left, right, total.dtype, onednn)


# A custom operation: Inductor would write the sum into a new tensor.
@torch.library.custom_op("lockstep::add_product", mutates_args=("total",))
def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def by_onednn(left: Tensor, right: Tensor) -> Tensor:
    """Multiply two FP32 matrices on the CPU with oneDNN, (m, k) · (k, n) → (m, n).

    MKL, torch's BLAS on x86, uses no more than AVX2 on processors that are not made by Intel. oneDNN uses AVX-512 on
    every processor that has it.
    """
    made: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "")
    return made
