"""Rotate pairs by an angle in whole rows: in eager mode half as many passes over memory, with the same bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Rotated(torch.autograd.Function):
    """The function [left, right] ⊙ [cos, cos] + [right, left] ⊙ [−sin, sin]; only the tables are saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return (x * torch.cat((cos, cos), -1)).add_(_halves_swapped(x).mul_(torch.cat((-sin, sin), -1)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        other = _halves_swapped(grads[0]).mul_(torch.cat((sin, -sin), -1))
        return (grads[0] * torch.cat((cos, cos), -1)).add_(other), None, None


def _halves_swapped(x: Tensor) -> Tensor:
    left, right = torch.chunk(x, 2, dim=-1)
    return torch.cat((right, left), dim=-1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + E/2) of the last axis of x (…, E); the tables broadcast to (…, E/2)."""
    # If the tables are wider than x, autograd rounds the gradient of each product to the dtype of x before the sum.
    if torch.compiler.is_compiling() or x.dtype != cos.dtype:
        left, right = torch.chunk(x, 2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
    made: Tensor = _Rotated.apply(x, cos, sin)
    return made
