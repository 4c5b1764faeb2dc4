"""Apply each operator of core/mutate/operators.py to a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.core.mutate.mutant import Operator
from lockstep.core.mutate.operators import CUT

Change = Callable[[Tensor], Tensor]
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}


def change_of(operator: Operator, axes: tuple[str, ...]) -> Change:
    """Return the function that applies `operator` to a tensor with these axes, or to a number without axes.

    The operators `other`, `stale` and `own` are not functions of the tensor, and have no entry.
    """
    name, arguments = operator.name, operator.arguments
    axis = axes.index(arguments[0]) if name in ("zero", "shift", "swap") else 0
    if name == "zero":
        return lambda x: x.index_fill(axis, _index(x, axis, arguments[1]), 0)
    if name == "swap":
        return lambda x: x.index_select(axis, _swapped(x, axis))
    return {
        # masked_fill gives x a gradient of zeros; a new tensor of zeros would give it none.
        "drop": lambda x: x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0),
        "twice": lambda x: 2 * x,
        "flip": lambda x: -x,
        "shift": lambda x: x.roll(1, axis),
        "scale": lambda x: x * operator.factor,
        "factor": lambda x: x * float(arguments[0]),
        "narrow": lambda x: straight(x, lambda value: _narrow(value, NARROW[arguments[0]])),
        "truncate": lambda x: straight(x, lambda value: _truncated(value, CUT[arguments[0]])),
    }[name]


def _index(x: Tensor, axis: int, where: str) -> Tensor:
    size = x.shape[axis]
    return torch.tensor([{"first": 0, "middle": size // 2, "last": size - 1}[where]], device=x.device)


def _swapped(x: Tensor, axis: int) -> Tensor:
    order = torch.arange(x.shape[axis], device=x.device)
    return torch.where(order < 2, (1 - order).clamp(max=x.shape[axis] - 1), order) if x.shape[axis] > 1 else order


def _narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    # A cast to e4m3 saturates in some versions of torch and gives NaN in others.
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).to(x.dtype)


def _truncated(x: Tensor, bits: int) -> Tensor:
    return (x.float().contiguous().view(torch.int32) & -(1 << bits)).view(torch.float32).to(x.dtype)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Change) -> Tensor:
        return change(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight(x: Tensor, change: Change) -> Tensor:
    """Return `change` of x; the backward pass is the identity."""
    changed: Tensor = _Straight.apply(x, change)
    return changed


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Change) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grads[0]), None


def backward(x: Tensor, change: Change) -> Tensor:
    """Return x; the backward pass applies `change` to the gradient."""
    changed: Tensor = _Backward.apply(x, change)
    return changed


def region(condition: str, tokens_BS: Tensor) -> Tensor | None:
    """Return bool (B, S): the positions where a condition holds; None for a condition on whole tensors."""
    if condition == "last-row":
        held = torch.zeros_like(tokens_BS, dtype=torch.bool)
        held[-1] = True
        return held
    if condition == "last-position":
        return torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS) == tokens_BS.shape[1] - 1
    if condition == "repeated":
        same = tokens_BS[:, :, None] == tokens_BS[:, None, :]
        return same.tril(-1).any(-1)
    return None


def within(held_BS: Tensor | None, change: Change) -> Change:
    """Return a function that applies `change` to a tensor (B, S, …) only where the region holds."""
    if held_BS is None:
        return change

    def changed(x: Tensor) -> Tensor:
        held = held_BS.reshape(*held_BS.shape, *(1,) * (x.dim() - 2))
        return torch.where(held, change(x), x)

    return changed
