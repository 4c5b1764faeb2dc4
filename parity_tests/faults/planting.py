"""Tools for planted faults: replace modules, change gradients in the backward pass, round numbers."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.torch_backend.model import Transformer
from lockstep.torch_backend.session import TorchSession

Change = Callable[[Tensor], Tensor]


def swap(model: Transformer, right: type[nn.Module], wrong: type[nn.Module], where: str = "*") -> Transformer:
    """Set the class of each module of class `right` whose name matches `where` to `wrong`; return the model.

    The modules keep their weights. Raises ValueError if no module matches.
    """
    found = [m for name, m in model.named_modules() if type(m) is right and fnmatchcase(name, where)]
    if not found:
        raise ValueError(f"no {right.__name__} is called {where}")
    for module in found:
        module.__class__ = wrong
    return model


def in_model(plant: Callable[[Transformer], object]) -> type[TorchSession]:
    """Return a session class whose model has been changed by `plant`."""

    class Session(TorchSession):
        def build_model(self) -> Transformer:
            model = super().build_model()
            plant(model)
            return model

    return Session


def swapped(right: type[nn.Module], wrong: type[nn.Module], where: str = "*") -> type[TorchSession]:
    """Return a session class whose model has `wrong` modules in place of `right` ones (see `swap`)."""
    return in_model(lambda model: swap(model, right, wrong, where))


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Change) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grads[0]), None


def backward(x: Tensor, change: Change) -> Tensor:
    """Return `x`. In the backward pass its gradient g becomes `change(g)`."""
    changed: Tensor = _Backward.apply(x, change)
    return changed


def bf16(x: Tensor) -> Tensor:
    """Return `x` rounded to bf16, in its own dtype."""
    return x.bfloat16().to(x.dtype)


class _RoundedDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: int) -> Tensor:
        step = 1 << dropped
        bits = x.float().view(torch.int32)
        below = ((bits & (step - 1)) != 0) & (bits < 0)
        return ((bits & -step) + below.to(torch.int32) * step).view(torch.float32).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def rounded_down(x: Tensor, dropped: int) -> Tensor:
    """Return the largest FP32 number ≤ x whose last `dropped` mantissa bits are zero (16: bf16)."""
    rounded: Tensor = _RoundedDown.apply(x, dropped)
    return rounded
