"""Precision policies, and the matrix products whose casts are the policy. Twin: jax_backend/precision.py.

Weights, residual stream, norms, RoPE, softmax and loss are in the *stream* dtype. A matrix product casts its operands
to the *operand* dtype, accumulates in FP32 at least, and rounds its output to the operand dtype, except the head, whose
logits leave the product in the stream dtype.

Backward casts under bf16: the gradient of a product's output is rounded to bf16 before both backward products, whose
results are bf16, then FP32. For `linear` that is what autograd makes of the casts; `head` needs a rule of its own: its
weight's gradient, a sum over all tokens that is made chunk by chunk, leaves the product in the stream dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torch_backend.float8 import Float8


@dataclass(frozen=True)
class Policy:
    """stream: dtype of everything but matrix operands. operand: dtype of both operands of a matrix product."""

    name: str
    stream: torch.dtype
    operand: torch.dtype


# TF32 is what CUDA makes of FP32 operands (torch_backend/session.py asks for it). FP8 is the business of single layers.
POLICIES = {
    "fp64": Policy("fp64", torch.float64, torch.float64),
    "fp32": Policy("fp32", torch.float32, torch.float32),
    "tf32": Policy("tf32", torch.float32, torch.float32),
    "bf16": Policy("bf16", torch.float32, torch.bfloat16),
    "fp16": Policy("fp16", torch.float32, torch.float16),
    "fp8_tensorwise": Policy("fp8_tensorwise", torch.float32, torch.bfloat16),
    "fp8_rowwise": Policy("fp8_rowwise", torch.float32, torch.bfloat16),
}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, policy: Policy, float8: Float8 | None = None) -> Tensor:
    """X (…, in), weight (out, in) → (…, out) in the stream dtype; the bias is added in the stream dtype.

    float8: makes the product in FP8 (torch_backend/float8.py).
    """
    x = x.to(policy.operand)
    if float8 is not None:
        y = float8.product(x, weight)
    elif slow(x):
        y = F.linear(x.to(policy.stream), weight.to(policy.operand).to(policy.stream)).to(policy.operand)
    else:
        y = F.linear(x, weight.to(policy.operand))
    return y.to(policy.stream) if bias is None else y.to(policy.stream) + bias


def head(x_BSD: Tensor, weight_VD: Tensor, policy: Policy) -> Tensor:
    """Logits (B, S, V) in the stream dtype: operands rounded to the operand dtype, output not rounded."""
    if policy.operand == policy.stream:
        return F.linear(x_BSD, weight_VD)
    logits: Tensor = _Head.apply(x_BSD, weight_VD, policy.operand)
    return logits


class _Head(torch.autograd.Function):
    """Autograd would leave the gradient of FP32 logits in FP32; the policy rounds it before both products."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, weight_VD: Tensor, operand: torch.dtype) -> Tensor:
        x, weight = x_BSD.to(operand), weight_VD.to(operand)
        ctx.save_for_backward(x, weight)
        ctx.stream = x_BSD.dtype
        return wide_product(x.flatten(0, -2), weight.T, x_BSD.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        grad_x = narrow_product(grad.flatten(0, -2), weight, ctx.stream).unflatten(0, grad.shape[:-1])
        return grad_x, wide_product(grad.flatten(0, -2).T, x.flatten(0, -2), ctx.stream), None


def slow(x: Tensor) -> bool:
    """Whether products of this operand are made in FP32 and rounded: the CPU's own FP16 takes fifty times as long."""
    return x.dtype == torch.float16 and not x.is_cuda


def narrow_product(left: Tensor, right: Tensor, out: torch.dtype) -> Tensor:
    """The product of two matrices of the operand dtype, rounded to that dtype, in the stream dtype `out`."""
    if slow(left):
        return wide_product(left, right, out).to(left.dtype).to(out)
    return torch.mm(left, right).to(out)


def wide_product(left: Tensor, right: Tensor, out: torch.dtype) -> Tensor:
    """The product of two matrices of the operand dtype, in the stream dtype `out`: not rounded on the way out."""
    if left.dtype == out:
        return torch.mm(left, right)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=out)
    # The CPU has no low-precision product with FP32 output; products of bf16 values are exact in FP32.
    return torch.mm(left.to(out), right.to(out))
