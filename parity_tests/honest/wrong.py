"""Wrong pairs: kernels with one planted fault each, and the plain function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.parity_tests.honest.kinds import (
    HEADS,
    SQUARE,
    Kind,
    attention,
    attention_wide,
    causal,
    gelu,
    layer_norm,
    layer_norm_of_torch,
    normal,
    rms_norm,
    rms_norm_wide,
    swiglu,
    wide,
)


class With(torch.autograd.Function):
    """Compute `function`, and replace its gradients g by `change(*g)` in the backward pass."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], change: Callable[..., Any], *inputs: Tensor) -> Tensor:
        ctx.function, ctx.change = function, change
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return function(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            found = torch.autograd.grad(ctx.function(*inputs), inputs, grad)
        return None, None, *ctx.change(*(g.clone() for g in found))


def changed(function: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs: With.apply(function, change, *inputs)


def doubled(gradient: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    at = gradient.abs().flatten().median(0).indices
    gradient.view(-1)[at] *= 2
    return gradient, *others


def a_500th_longer(gradient: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    return (wide(gradient) * 1.002).to(gradient.dtype), *others


def in_bf16(x: Tensor) -> Tensor:
    total = x[:, 0]
    for column in x.unbind(-1)[1:]:
        total = total + column
    return total


def softmax_in_bf16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (wide(q) @ wide(k).mT / math.sqrt(q.shape[-1])).to(q.dtype)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True) @ v


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(wide(q) * 1.002, wide(k), wide(v)).to(q.dtype)


def one_ahead(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention; the last query wrongly does not see its own token."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    ahead[-1, -1] = True
    return torch.softmax(scores.masked_fill(ahead, -math.inf), -1) @ v


def truncated(x: Tensor) -> Tensor:
    """Return 1.7·x, rounded toward zero by clearing the low bits instead of to nearest."""
    exact = wide(x) * 1.7
    return (exact.view(torch.int32) & -65536).view(torch.float32).to(x.dtype)


def strides_ignored(x: Tensor) -> Tensor:
    """Return a copy of `x` that reads its memory as if it were contiguous."""
    return torch.as_strided(x, x.shape, (x.shape[1], 1)) * 1.0


def not_a_number(x: Tensor) -> Tensor:
    found = F.gelu(x).flatten()
    return torch.cat([found[:-1], found[-1:] * math.nan]).view(x.shape)


def written(x: Tensor) -> Tensor:
    found = gelu(x)
    x.data.mul_(2)
    return found


def rms_norm_with(eps: float) -> Callable[..., Tensor]:
    return lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, eps)


def embedding(table: Tensor, ids: Tensor) -> Tensor:
    return table[ids]


def one_hot(table: Tensor, ids: Tensor) -> Tensor:
    return F.one_hot(ids, table.shape[0]).to(table.dtype) @ table


def table_and_ids(generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(50, 16, generator=generator), torch.randint(50, (8192,), generator=generator)]


NORM = normal((5, 33, 64), (64,))

# These gradients may show a fault or hide it: in a weight's gradient, a sum over many rows, faults may cancel.
MAY = {"grad weight", "grad x"}
# Name → pair, and the results that must be reported as wrong. No other result may be, except those of MAY for faults
# whose names begin with one of MANY.
MANY = ("an epsilon", "RMS norm in bf16")
WRONG: dict[str, tuple[Kind, set[str]]] = {
    "GELU by tanh": (
        Kind(lambda x: F.gelu(x, approximate="tanh"), gelu, normal((37, 21)), ("fp32",)), {"output", "grad x"}
    ),
    "an epsilon of 1e-6": (Kind(rms_norm_with(1e-6), rms_norm, NORM, ("fp32",)), {"output", "grad x"}),
    "an epsilon of 1e-6, small numbers": (
        Kind(rms_norm_with(1e-6), rms_norm, lambda g: [0.01 * x for x in NORM(g)], ("bf16", "fp16", "fp32")),
        {"output"},
    ),
    "a sum in the narrow format": (Kind(in_bf16, lambda x: x.sum(-1), normal((20, 600)), ("bf16", "fp16")), {"output"}),
    "a sum of positive numbers in it": (
        Kind(in_bf16, lambda x: x.sum(-1), lambda g: [torch.rand(20, 600, generator=g)], ("bf16", "fp16")), {"output"}
    ),
    "softmax in bf16": (
        Kind(softmax_in_bf16, attention_wide, HEADS, ("bf16", "fp16")), {"output", "grad q", "grad k", "grad v"}
    ),
    "RMS norm in bf16": (
        Kind(rms_norm, rms_norm_wide, NORM, ("bf16", "fp16")), {"output", "grad x"}
    ),
    "a scale of 1.002": (
        Kind(scaled, attention_wide, HEADS), {"output", "grad q", "grad k", "grad v"}
    ),
    "one doubled number": (Kind(changed(rms_norm, doubled), rms_norm, NORM), {"grad x"}),
    "one doubled number of attention": (Kind(changed(attention, doubled), attention, HEADS), {"grad q"}),
    "a gradient that is missing": (
        Kind(lambda x, weight: rms_norm(x, weight.detach()), rms_norm, NORM), {"grad weight"}
    ),
    "another input's gradient": (
        Kind(changed(swiglu, lambda a, b: (b, a)), swiglu, normal((40, 30), (40, 30))), {"grad gate", "grad up"}
    ),
    "a gradient a 500th too long": (
        Kind(changed(rms_norm_wide, a_500th_longer), rms_norm_wide, NORM, ("fp16", "fp32")),
        {"grad x"},
    ),
    "a wrong backward of SwiGLU": (
        Kind(changed(swiglu, lambda a, b: (a * 0.5 + b * 0.1, b)), swiglu, normal((40, 30), (40, 30))), {"grad gate"}
    ),
    "a mask one off in the last row": (
        Kind(one_ahead, causal, SQUARE), {"output", "grad q", "grad k", "grad v"}
    ),
    "rounding toward zero": (
        Kind(truncated, lambda x: x * 1.7, normal((60, 40)), ("bf16",), {"differentiate": False}), {"output"}
    ),
    "strides ignored": (
        Kind(strides_ignored, lambda x: x * 1, lambda g: [torch.randn(20, 30, generator=g).T]), {"output", "grad x"}
    ),
    "NaN": (Kind(not_a_number, gelu, normal((37, 21))), {"output", "grad x"}),
    "an input written into": (Kind(written, gelu, normal((37, 21)), options={"differentiate": False}), {"input x"}),
    "a narrower result": (
        Kind(lambda a, b: (a @ b).bfloat16(), lambda a, b: a @ b, normal((30, 40), (40, 20)), ("fp32",)),
        {"output", "grad a", "grad b"},
    ),
    "torch's backward of layer norm": (
        Kind(layer_norm_of_torch, layer_norm, normal((8192, 32), (32,), (32,)), ("bf16",)), {"grad weight", "grad bias"}
    ),
    "torch's backward of an embedding": (
        Kind(lambda table, ids: F.embedding(ids, table), one_hot, table_and_ids, ("bf16",)), {"grad table"}
    ),
}  # fmt: skip
