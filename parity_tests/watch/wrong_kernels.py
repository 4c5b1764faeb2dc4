"""Kernels of torch that are wrong on the CPU, and functions and modules that do something else than they declare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

SMALL_EPS = 1e-7


def gelu_by_tanh(x: Tensor, *, approximate: str = "none") -> Tensor:
    wide = x.double()
    return (wide * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))) / 2).to(x.dtype)


def layer_norm_with_another_epsilon(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.double()
    mean = wide.mean(-1, keepdim=True)
    rstd = ((wide - mean).square().mean(-1, keepdim=True) + SMALL_EPS).rsqrt()
    y = (wide - mean) * rstd
    y = y if weight is None else y * weight.double()
    y = y if bias is None else y + bias.double()
    return y.to(x.dtype), mean.to(x.dtype), rstd.to(x.dtype)


def product_without_bias(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return (a.double() @ b.double()).to(a.dtype)


def softmax_in_bf16(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    powers = (x - x.amax(dim, keepdim=True)).bfloat16().exp()
    return (powers / powers.sum(dim, keepdim=True)).to(x.dtype)


def sum_in_bf16(
    x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    total = x
    for axis in sorted((i % x.ndim for i in dim or range(x.ndim)), reverse=True):
        parts = total.movedim(axis, 0).bfloat16()
        added = parts[0].clone()
        for part in parts[1:]:
            added = added + part
        total = added.unsqueeze(axis) if keepdim else added
    return total.to(dtype or x.dtype)


# Operation, its kernel.
KERNELS: dict[str, tuple[str, Callable[..., Any]]] = {
    "GELU by tanh": ("aten::gelu", gelu_by_tanh),
    "epsilon": ("aten::native_layer_norm", layer_norm_with_another_epsilon),
    "missing bias": ("aten::addmm", product_without_bias),
    "softmax in bf16": ("aten::_softmax", softmax_in_bf16),
    "bf16 reduction": ("aten::sum.dim_IntList", sum_in_bf16),
}


@contextmanager
def kernel(fault: str) -> Iterator[None]:
    """Every operation of that name on the CPU is computed by the wrong kernel."""
    name, function = KERNELS[fault]
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl(name.removeprefix("aten::"), function, "CPU", allow_override=True)
        yield
    finally:
        library._destroy()


def only_in(module: nn.Module, function: Callable[..., Any]) -> None:
    """Replace a module's forward on the instance, as fused kernels do that are patched in."""
    module.forward = function.__get__(module)


def without_bias(self: Any, x: Tensor) -> Tensor:
    """For nn.Linear, and for Conv1D of transformers, whose weight is transposed."""
    return x @ (self.weight.t() if isinstance(self, nn.Linear) else self.weight)


def other_epsilon(self: Any, x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, SMALL_EPS)


def by_tanh(self: Any, x: Tensor) -> Tensor:
    return nn.functional.gelu(x, approximate="tanh")


@contextmanager
def narrow_softmax() -> Iterator[None]:
    """Somebody's softmax: to bf16 and back."""
    own = nn.functional.softmax

    def narrow(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return own(x.bfloat16(), *args, **kwargs).to(x.dtype)

    with ExitStack() as stack:
        stack.callback(setattr, nn.functional, "softmax", own)
        setattr(nn.functional, "softmax", narrow)  # noqa: B010
        yield
