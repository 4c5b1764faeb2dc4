"""Tools for planting: swap a module for a wrong one, change a gradient on its way back, round otherwise."""

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
    """Turn every module of class `right` whose name matches `where` into `wrong`, weights kept; return the model."""
    found = [m for name, m in model.named_modules() if type(m) is right and fnmatchcase(name, where)]
    if not found:
        raise ValueError(f"no {right.__name__} is called {where}")
    for module in found:
        module.__class__ = wrong
    return model


def in_model(plant: Callable[[Transformer], object]) -> type[TorchSession]:
    """Build a session whose model `plant` has changed."""

    class Session(TorchSession):
        def build_model(self) -> Transformer:
            model = super().build_model()
            plant(model)
            return model

    return Session


def swapped(right: type[nn.Module], wrong: type[nn.Module], where: str = "*") -> type[TorchSession]:
    """Build a session whose model has `wrong` modules in place of `right` ones."""
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
    """`x` itself; its gradient becomes `change` of what comes back."""
    changed: Tensor = _Backward.apply(x, change)
    return changed


def bf16(x: Tensor) -> Tensor:
    """Round to bf16 and keep the dtype."""
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
    """Return the next FP32 number not above x with its last `dropped` bits zero; 16 of them make it bf16."""
    rounded: Tensor = _RoundedDown.apply(x, dropped)
    return rounded
