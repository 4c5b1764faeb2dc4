"""Wrong kernels of torch, and functions and modules that differ from their declaration."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALL_EPS = 1e-7


def _gelu(x: Tensor, tanh: bool) -> Tensor:
    wide = x.double()
    inner = (2 / math.pi) ** 0.5 * (wide + 0.044715 * wide**3)
    return (wide * (1 + (inner.tanh() if tanh else (wide / 2**0.5).erf())) / 2).to(x.dtype)


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.double()
    mean = wide.mean(-1, keepdim=True)
    rstd = ((wide - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    y = (wide - mean) * rstd
    y = y if weight is None else y * weight.double()
    y = y if bias is None else y + bias.double()
    return y.to(x.dtype), mean.to(x.dtype), rstd.to(x.dtype)


def _addmm(bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    product = a.double() @ b.double()
    return (product if bias is None else product + bias.double()).to(a.dtype)


def _softmax(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    powers = (x - x.amax(dim, keepdim=True)).to(dtype).exp()
    return (powers / powers.sum(dim, keepdim=True)).to(x.dtype)


def _sum(x: Tensor, dim: Sequence[int] | None, keepdim: bool, dtype: torch.dtype) -> Tensor:
    """Add one after another, each sum rounded to the dtype."""
    total = x
    for axis in sorted((i % x.ndim for i in dim or range(x.ndim)), reverse=True):
        first, *others = total.movedim(axis, 0).to(dtype)
        for part in others:
            first = first + part
        total = first.unsqueeze(axis) if keepdim else first
    return total.to(x.dtype)


def _sum_in_bf16(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return _sum(x, dim, keepdim, torch.bfloat16)


def _sum_in_fp64(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return _sum(x, dim, keepdim, torch.float64)


@dataclass(frozen=True)
class Kernel:
    """A wrong kernel of an operation, and a correct one in FP64, rounded once."""

    operation: str
    wrong: Callable[..., Any]
    right: Callable[..., Any]


KERNELS = {
    "GELU by tanh": Kernel(
        "gelu", lambda x, *, approximate="none": _gelu(x, True), lambda x, *, approximate="none": _gelu(x, False)
    ),
    "epsilon": Kernel(
        "native_layer_norm",
        lambda x, shape, weight, bias, eps: _layer_norm(x, weight, bias, SMALL_EPS),
        lambda x, shape, weight, bias, eps: _layer_norm(x, weight, bias, eps),
    ),
    "missing bias": Kernel(
        "addmm", lambda bias, a, b, *, beta=1, alpha=1: _addmm(None, a, b),
        lambda bias, a, b, *, beta=1, alpha=1: _addmm(bias, a, b),
    ),
    "softmax in bf16": Kernel(
        "_softmax", lambda x, dim, half_to_float: _softmax(x, dim, torch.bfloat16),
        lambda x, dim, half_to_float: _softmax(x, dim, torch.float64),
    ),
    "bf16 reduction": Kernel("sum.dim_IntList", _sum_in_bf16, _sum_in_fp64),
}  # fmt: skip


@contextmanager
def kernel(name: str, right: bool = False, device: str = "cpu") -> Iterator[None]:
    """Replace a kernel's operation on a device by the wrong kernel, or by the other correct one."""
    chosen = KERNELS[name]
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            # The override is intended, and torch warns about it once.
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            function = chosen.right if right else chosen.wrong
            library.impl(chosen.operation, function, device.upper(), allow_override=True)
        yield
    finally:
        library._destroy()


def only_in(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace a module's forward on the instance, as patched-in fused kernels do."""
    module.forward = forward.__get__(module)


def without_bias(self: Any, x: Tensor) -> Tensor:
    """Leave out the bias, in nn.Linear and in Conv1D of transformers, whose weight is transposed."""
    return x @ (self.weight.t() if isinstance(self, nn.Linear) else self.weight)


def other_epsilon(self: Any, x: Tensor) -> Tensor:
    """Normalise with another ε, in nn.LayerNorm."""
    return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, SMALL_EPS)


def by_tanh(self: Any, x: Tensor) -> Tensor:
    """Compute a GELU module by tanh."""
    return F.gelu(x, approximate="tanh")


@contextmanager
def narrow_softmax() -> Iterator[None]:
    """Replace softmax by one that rounds to bf16 and back."""
    own = F.softmax

    def narrow(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return own(x.bfloat16(), *args, **kwargs).to(x.dtype)

    F.softmax = narrow  # type: ignore[assignment]
    try:
        yield
    finally:
        F.softmax = own
