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
from lockstep.torch_backend.kernels import wide_product as block_product

if TYPE_CHECKING:
    from lockstep.torch_backend.kernels.float8 import Float8

# Multiplies two matrices; with a third argument, adds it to each row.
Product = Callable[..., Tensor]


@dataclass(frozen=True)
class Policy:
    """A precision policy in torch's dtypes.

    stream: dtype of all tensors except operands of products. operand: dtype of both operands of a matrix product.
    library: of products with an FP32 result on the CPU: "blas" (torch's), "onednn" (of FP32 operands) or "brgemm" (of
    FP32 or bf16 operands), which may sum in different orders. casts: the plan of casts, which other tensors are rounded
    to the operand dtype.
    """

    name: str
    stream: torch.dtype
    operand: torch.dtype
    library: str = "blas"
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
    """Return the policy of a run. Raises UserError if its library of products is not there or cannot be built."""
    library = _library(config)
    if library == "brgemm":
        block_product.build(POLICIES[config.precision.policy].operand)
    return replace(POLICIES[config.precision.policy], library=library, casts=config.precision.plan)


def products_in_force(config: RunConfig, device: torch.device) -> dict[str, str]:
    """Describe the products on the CPU for the table at start: their libraries, and roundings that torch adds."""
    told = {}
    library, operand = _library(config), precision.FORMATS[config.precision.operand]
    titles = {"onednn": "oneDNN", "brgemm": "oneDNN's block product"}
    if operand.bytes == 4 and library in titles:
        told["FP32 products"] = titles[library]
    elif device.type == "cpu" and operand.name == "bf16" and not config.precision.plan.rounds("logits"):
        told["bf16 products with FP32 results"] = titles.get(library, "from FP32 copies of their operands")
    if _is_slow(DTYPES[config.precision.operand], device):
        told[f"{config.precision.operand} products"] = "computed in FP32, then rounded"
    return told


def _library(config: RunConfig) -> str:
    # A session's configuration has no `auto` that means oneDNN (core/config/auto.py); a remaining `auto` means BLAS.
    asked = config.precision.cpu_products
    if asked == "auto":
        return "blas"
    if asked != "blas" and not torch.backends.mkldnn.is_available():
        raise UserError(f"precision.cpu_products = '{asked}': this torch was built without oneDNN; take 'blas'")
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
        y = _Linear.apply(x, weight.to(policy.operand), None, by_fp32)
    elif x.dtype == torch.float32 and policy.library != "blas":
        product = by_onednn if policy.library == "onednn" else block_product.wide_product
        y = _Linear.apply(x, weight, None, product)
    else:
        y = F.linear(x, weight.to(policy.operand))
    return policy.kept(y if bias is None else y.to(policy.stream) + bias, "linear")


def _with_bias(x: Tensor, weight: Tensor, bias: Tensor, policy: Policy) -> Tensor:
    """Compute x·Wᵀ + b with all operands in the operand dtype, and round the sum once. x has the operand dtype."""
    weight, bias = weight.to(policy.operand), bias.to(policy.operand)
    y = _Linear.apply(x, weight, bias, by_fp32) if slow(x) else F.linear(x, weight, bias)
    return policy.kept(y, "linear")


def head(x_BSD: Tensor, weight_VD: Tensor, policy: Policy) -> Tensor:
    """Return logits (B, S, V): operands are rounded to the operand dtype, the output has the stream dtype.

    If the plan of casts rounds logits, they are computed like a linear layer, and have the operand dtype.
    """
    if policy.casts.rounds("logits"):
        return linear(x_BSD, weight_VD, None, policy).to(policy.operand)
    if policy.operand == policy.stream:
        return linear(x_BSD, weight_VD, None, policy)
    logits: Tensor = _Head.apply(x_BSD, weight_VD, policy.operand, policy.library)
    return logits


class _Linear(torch.autograd.Function):
    """The product x (…, in) · Wᵀ + bias (out,), forward and backward, by one function for all products.

    A function that adds no bias gets none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased, ctx.product = bias is not None, product
        added = () if bias is None else (bias,)
        return product(x.flatten(0, -2), weight.T, *added).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        grad_x = ctx.product(grad, weight).unflatten(0, x.shape[:-1])
        return grad_x, ctx.product(grad.T, x.flatten(0, -2)), grad.sum(0) if ctx.biased else None, None


class _Head(torch.autograd.Function):
    """The product of a head with FP32 output; the backward pass rounds the output's gradient before both products.

    Plain autograd would keep that gradient in FP32.
    """

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, weight_VD: Tensor, operand: torch.dtype, library: str) -> Tensor:
        x, weight = x_BSD.to(operand), weight_VD.to(operand)
        ctx.save_for_backward(x, weight)
        ctx.of_x, ctx.stream, ctx.library = x_BSD.dtype, weight_VD.dtype, library
        return wide_product(x.flatten(0, -2), weight.T, weight_VD.dtype, library).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        grad_x = narrow_product(grad.flatten(0, -2), weight, ctx.stream, ctx.library).unflatten(0, grad.shape[:-1])
        grad_weight = wide_product(grad.flatten(0, -2).T, x.flatten(0, -2), ctx.stream, ctx.library)
        return grad_x.to(ctx.of_x), grad_weight, None, None


# torch hands bf16 products to oneDNN on CPUs for which oneDNN has kernels (on x86 those with AVX-512). On the others
# torch computes them in plain loops, 3 to 130 times as slow as products in FP32 (docs/results/narrow_products.md).
BF16_BY_ONEDNN: bool = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def slow(x: Tensor) -> bool:
    """Return whether products of x are computed in FP32 and then rounded (`by_fp32`).

    On the CPU this is so in FP16, and in bf16 where torch has only plain loops for it.
    """
    return _is_slow(x.dtype, x.device)


def _is_slow(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and (dtype == torch.float16 or (dtype == torch.bfloat16 and not BF16_BY_ONEDNN))


def narrow_product(left: Tensor, right: Tensor, out: torch.dtype, library: str = "blas") -> Tensor:
    """Multiply two matrices of the operand dtype, round the product to that dtype, and cast it to `out`."""
    if left.dtype == out:
        return wide_product(left, right, out, library)
    return (by_fp32 if slow(left) else torch.mm)(left, right).to(out)


def wide_product(left: Tensor, right: Tensor, out: torch.dtype, library: str = "blas") -> Tensor:
    """Multiply two matrices of the operand dtype; the product has the stream dtype `out`, without another rounding."""
    if left.is_cuda and left.dtype != out:
        return torch.mm(left, right, out_dtype=out)
    if library == "brgemm":
        return block_product.wide_product(left, right)
    # torch's own products on the CPU have the dtype of their operands; products of bf16 values are exact in FP32.
    product = by_onednn if library == "onednn" and out == torch.float32 else torch.mm
    return product(left.to(out), right.to(out))


def add_product(total: Tensor, left: Tensor, right: Tensor, library: str = "blas") -> None:
    """Add the wide product of two matrices of the operand dtype to `total`, of the stream dtype, in place.

    On CUDA, and by oneDNN's block product on the CPU, the product adds to `total` as it writes (beta = 1), with the
    roundings of a separate product and sum; of FP32 operands, every 512 terms. Elsewhere the product is computed first.
    """
    if left.is_cuda and left.dtype != total.dtype:
        _add_product(total, left, right)
    elif library == "brgemm":
        block_product.add_wide_product(total, left, right)
    else:
        total += wide_product(left, right, total.dtype, library)


# A custom operation: Inductor would write the sum into a new tensor.
@torch.library.custom_op("lockstep::add_product", mutates_args=("total",))
def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def by_fp32(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute left (m, k) · right (k, n) + bias (n,) of a narrow dtype on the CPU in FP32, and round once → (m, n).

    Products of single elements are exact in FP32. So the result differs from that of narrow instructions, which also
    add in FP32, only by the order of the sums.
    """
    made: Tensor = torch.ops.lockstep.product_by_fp32.default(left, right, bias)
    return made


# An operation of its own: checkpointing keeps its narrow result (torch_backend/kernels/recompute.py), and Inductor does
# not remove its roundings.
torch.library.define("lockstep::product_by_fp32", "(Tensor left, Tensor right, Tensor? bias) -> Tensor")


@torch.library.impl("lockstep::product_by_fp32", "CPU")
def _product_by_fp32(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    # The FP32 operands are freed before the result is rounded.
    if bias is None:
        wide = torch.mm(left.float(), right.float())
    else:
        wide = torch.addmm(bias.float(), left.float(), right.float())
    return wide.to(left.dtype)


@torch.library.register_fake("lockstep::product_by_fp32")
def _shape_of_product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


def by_onednn(left: Tensor, right: Tensor) -> Tensor:
    """Multiply two FP32 matrices on the CPU with oneDNN, (m, k) · (k, n) → (m, n).

    MKL, torch's BLAS on x86, uses no more than AVX2 on processors that are not made by Intel. oneDNN uses AVX-512 on
    every processor that has it.
    """
    made: Tensor = torch.ops.lockstep.product_by_onednn.default(left, right)
    return made


# An operation of its own: Inductor would copy transposed operands. oneDNN reads a transposed right one as it is; torch
# copies a transposed left one.
torch.library.define("lockstep::product_by_onednn", "(Tensor left, Tensor right) -> Tensor")


@torch.library.impl("lockstep::product_by_onednn", "CPU")
def _product_by_onednn(left: Tensor, right: Tensor) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "")
    return made


@torch.library.register_fake("lockstep::product_by_onednn")
def _shape_by_onednn(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])
