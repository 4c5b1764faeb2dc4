"""Precision policies, and the matrix products whose casts are the policy. Twin: jax_backend/precision.py.

Weights, residual stream, norms, RoPE, softmax and loss are in the *stream* dtype. A matrix product casts its operands
to the *operand* dtype, accumulates in FP32 at least, and rounds its output to the operand dtype, except the head, whose
logits leave the product in the stream dtype. Other roundings are the plan of casts (`precision.casts`): tensors
that it keeps in the operand format have that dtype.

Backward casts under bf16: the gradient of a product's output is rounded to bf16 before both backward products, whose
results are bf16, then FP32. For `linear` that is what autograd makes of the casts; `head` needs a rule of its own: its
weight's gradient, a sum over all tokens that is made chunk by chunk, leaves the product in the stream dtype.
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

    stream: dtype of everything but matrix operands. operand: dtype of both operands of a matrix product.

    onednn: FP32 products on the CPU are oneDNN's, not those of torch's BLAS: the order of their sums is another one.
    casts: what else is rounded to the operand dtype.
    """

    name: str
    stream: torch.dtype
    operand: torch.dtype
    onednn: bool = False
    casts: CastPlan = LOCKSTEP

    def kept(self, x: Tensor, key: str) -> Tensor:
        """Cast x to the dtype in which the plan of casts keeps `key`: the operand dtype, or the stream's."""
        return x.to(self.operand if self.casts.keeps(key) else self.stream)

    def read(self, x: Tensor, key: str) -> Tensor:
        """Cast x to the stream dtype where something reads it. key: of the plan, by which x is kept; the twin needs it.

        The residual stream gets a node of its own in autograd's graph. A norm uses its input more than once: all that
        it sends back there is added up before anything else, as with a tap, whatever the norm's code is.
        """
        x = x.to(self.stream)
        return x.view_as(x) if key == "residual" else x

    def rotated(self, rotate: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply a rotation with the plan's casts of what it reads and writes."""
        x = self.kept(x, "rope") if self.casts.rounds("rope") else self.read(x, "linear")
        return self.kept(rotate(self.read(x, "rope") if self.casts.rotates_widely else x), "rotation")

    def tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return RoPE's tables in the stream dtype, with the plan's rounding."""
        cos, sin = cos.to(self.stream), sin.to(self.stream)
        return (cos.to(self.operand), sin.to(self.operand)) if self.casts.rotates_narrowly else (cos, sin)

    def activated(self, activate: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Apply an activation with the plan's casts of what it reads, one tensor or gate and up, and writes."""
        if not self.casts.rounds("act"):
            return activate(*(self.read(x, "linear") for x in inputs))
        inputs = tuple(self.kept(x, "act") for x in inputs)
        if not self.casts.rounds_inside_act:
            inputs = tuple(self.read(x, "act") for x in inputs)
        return self.kept(activate(*inputs), "act")


# By the name of core/components/precision.py. CUDA makes TF32 of FP32 operands (torch_backend/switches.py sets that).
# FP8 applies to single layers, not to a policy.
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
    """Return the policy of a run. Raises UserError for oneDNN's products if torch was built without oneDNN."""
    return replace(POLICIES[config.precision.policy], onednn=_by_onednn(config), casts=config.precision.plan)


def products_in_force(config: RunConfig) -> dict[str, str]:
    """Name the library of FP32 products on the CPU, for the table at start, if it is not torch's BLAS."""
    return {"FP32 products": "oneDNN"} if _by_onednn(config) else {}


def _by_onednn(config: RunConfig) -> bool:
    # A session's configuration is settled (core/config/auto.py); `auto` remains where it means BLAS. Under bf16 the few
    # FP32 products, the head's, stay those that bounds were measured with.
    asked = config.precision.cpu_products == "onednn"
    if asked and not torch.backends.mkldnn.is_available():
        raise UserError("precision.cpu_products = 'onednn': this torch was built without oneDNN; take 'blas'")
    return asked


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, policy: Policy, float8: Float8 | None = None) -> Tensor:
    """Project x (…, in) by weight (out, in) → (…, out).

    The output, to which the bias is added, is in the stream dtype unless the plan of casts sets another.

    float8: makes the product in FP8 (torch_backend/kernels/float8.py), under a policy whose operands are bf16: a layer
    in FP8 is so under the run's own policy, and `evaluate` may ask for another one.
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
    """Compute a product with a bias of the operand dtype, and one rounding of the sum. x is of the operand dtype."""
    weight, bias = weight.to(policy.operand), bias.to(policy.operand)
    if slow(x):
        wide = F.linear(x.to(policy.stream), weight.to(policy.stream), bias.to(policy.stream))
        return policy.kept(wide.to(policy.operand), "linear")
    return policy.kept(F.linear(x, weight, bias), "linear")


def head(x_BSD: Tensor, weight_VD: Tensor, policy: Policy) -> Tensor:
    """Return logits (B, S, V) in the stream dtype: operands rounded to the operand dtype, output not rounded.

    Under a plan that rounds logits they are a linear layer's, in the operand dtype.
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
    """The product of an FP32 head whose gradient is rounded before both products; autograd would leave it in FP32."""

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
    """Return whether this operand's products are FP32 and then rounded: FP16 on the CPU is fifty times as slow."""
    return x.dtype == torch.float16 and not x.is_cuda


def narrow_product(left: Tensor, right: Tensor, out: torch.dtype, onednn: bool = False) -> Tensor:
    """Multiply two matrices of the operand dtype; round to that dtype and return it in the stream dtype `out`."""
    if slow(left) or left.dtype == out:
        return wide_product(left, right, out, onednn).to(left.dtype).to(out)
    return torch.mm(left, right).to(out)


def wide_product(left: Tensor, right: Tensor, out: torch.dtype, onednn: bool = False) -> Tensor:
    """Multiply two matrices of the operand dtype into the stream dtype `out`: not rounded on the way out."""
    if left.is_cuda and left.dtype != out:
        return torch.mm(left, right, out_dtype=out)
    # The CPU has no low-precision product with FP32 output; products of bf16 values are exact in FP32.
    product = by_onednn if onednn and out == torch.float32 else torch.mm
    return product(left.to(out), right.to(out))


def add_product(total: Tensor, left: Tensor, right: Tensor, onednn: bool = False) -> None:
    """Add the wide product of two matrices of the operand dtype to `total`, of the stream dtype, in its memory.

    CUDA's product adds while it writes (cuBLAS: beta = 1): an FP32 sum of its terms and what stands there, rounded as
    if the product had been written and read again. The CPU's is made first.
    """
    if left.is_cuda and left.dtype != total.dtype:
        _add_product(total, left, right)
    else:
        total += wide_product(left, right, total.dtype, onednn)


# Inductor would write the sum into a separate tensor.
@torch.library.custom_op("lockstep::add_product", mutates_args=("total",))
def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def by_onednn(left: Tensor, right: Tensor) -> Tensor:
    """Multiply two FP32 matrices on the CPU with oneDNN, (m, k) · (k, n).

    MKL, torch's BLAS on x86, keeps to AVX2 on processors that are not Intel's; oneDNN uses AVX-512 wherever it is.
    """
    made: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "")
    return made
