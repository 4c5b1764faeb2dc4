"""Tools for planting: swap a module for a wrong one, change a gradient on its way back, round otherwise."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from torch_backend.model import Llama
from torch_backend.session import TorchSession

Change = Callable[[Tensor], Tensor]


def swap(model: Llama, right: type[nn.Module], wrong: type[nn.Module], where: str = "*") -> Llama:
    """The model with every module of class `right` whose name matches `where` turned into `wrong`, weights kept."""
    found = [m for name, m in model.named_modules() if type(m) is right and fnmatchcase(name, where)]
    if not found:
        raise ValueError(f"no {right.__name__} is called {where}")
    for module in found:
        module.__class__ = wrong
    return model


def in_model(plant: Callable[[Llama], object]) -> type[TorchSession]:
    """A session whose model `plant` has changed."""

    class Session(TorchSession):
        def build_model(self) -> Llama:
            model = super().build_model()
            plant(model)
            return model

    return Session


def swapped(right: type[nn.Module], wrong: type[nn.Module], where: str = "*") -> type[TorchSession]:
    """A session whose model has `wrong` modules in place of `right` ones."""
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
    """Rounded to bf16 and kept in its own dtype."""
    return x.bfloat16().to(x.dtype)


class _RoundedDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        bits = x.float().view(torch.int32)
        dropped = (bits & 0xFFFF) != 0
        bits = (bits & -0x10000) + torch.where(dropped & (bits < 0), 0x10000, 0).to(torch.int32)
        return bits.view(torch.float32).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return bf16(grads[0])


def bf16_rounded_down(x: Tensor) -> Tensor:
    """The next bf16 number that is not above x, in x's dtype; the gradient is rounded to nearest."""
    rounded: Tensor = _RoundedDown.apply(x)
    return rounded


class _SumRounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, toward: float, share: float) -> Tensor:
        exact, nearest = x.double() + y.double(), x + y
        goal = torch.full_like(nearest, toward)
        passed = nearest.double() > exact if toward else nearest.double().abs() > exact.abs()
        columns = torch.arange(x.shape[-1], device=x.device) < share * x.shape[-1]
        return torch.where(passed & columns, torch.nextafter(nearest, goal), nearest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return grads[0], grads[0], None, None


def sum_rounded(x: Tensor, y: Tensor, toward: float, share: float = 1.0) -> Tensor:
    """FP32 x + y rounded toward zero, or toward −∞ for `toward` = −inf, in the first `share` of the columns."""
    total: Tensor = _SumRounded.apply(x, y, toward, share)
    return total
