"""Norms and activations for eager mode, with fewer passes over memory and fewer saved tensors.

The operations and their operands are those of plain autograd, so the bits are the same; an operation overwrites the
result of the one before. In a compiled program plain operations are used, and the compiler fuses them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RMSNorm(torch.autograd.Function):
    """The function x (…, D) / √(mean(x²) + eps) · gain (D,); x, gain and 1/√(mean(x²) + eps) are saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        scale = torch.square(x).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, gain)
        return (x * scale).mul_(gain)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scale, gain = ctx.saved_tensors
        grad_gain = (x * scale).mul_(grads[0]).sum_to_size(gain.shape)
        grad = grads[0] * gain
        grad_scale = (grad * x).sum_to_size(scale.shape)
        # Derivatives of the reciprocal root, the mean and the square, in autograd's order.
        grad_square = (-0.5 * grad_scale).mul_(scale.pow(3)).div_(x.shape[-1])
        return grad.mul_(scale).add_(x * grad_square.mul_(2)), grad_gain, None


class _Gated(torch.autograd.Function):
    """The function silu(gate) ⊙ up; silu(gate) is not saved."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0] * up, gate), F.silu(gate).mul_(grads[0])


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return x (…, D) / √(mean(x²) + eps) · gain (D,), computed in this order (Zhang & Sennrich 2019)."""
    if torch.compiler.is_compiling():
        return x * torch.rsqrt(torch.square(x).mean(-1, keepdim=True) + eps) * gain
    made: Tensor = _RMSNorm.apply(x, gain, eps)
    return made


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) ⊙ up."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    made: Tensor = _Gated.apply(gate, up)
    return made
