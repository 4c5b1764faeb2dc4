"""Recompute in the backward pass what eager autograd would keep although it is cheap: products of two kept tensors.

The same operations on the same numbers: the bits are those of plain autograd. A compiler decides for itself what it
keeps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _Scaled(torch.autograd.Function):
    """X (…, D) · scale (…, 1) · gain (D,); x · scale is not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale, gain)
        return x * scale * gain

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, scale, gain = ctx.saved_tensors
        grad_gain = (grads[0] * (x * scale)).sum_to_size(gain.shape)
        grad = grads[0] * gain
        return grad * scale, (grad * x).sum_to_size(scale.shape), grad_gain


class _Gated(torch.autograd.Function):
    """silu(gate) ⊙ up; silu(gate) is not kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0] * up, gate), grads[0] * F.silu(gate)


def scaled(x: Tensor, scale: Tensor, gain: Tensor) -> Tensor:
    """X (…, D) · scale (…, 1) · gain (D,), in this order."""
    if torch.compiler.is_compiling():
        return x * scale * gain
    made: Tensor = _Scaled.apply(x, scale, gain)
    return made


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) ⊙ up."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    made: Tensor = _Gated.apply(gate, up)
    return made
