"""Single functions of torch and Liger-Kernel, forward and backward, beside an equivalent plain function."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep import NotHonest, assert_honest
from lockstep.scripts.museum.seen import Seen

# Rows and tokens of the inputs whose errors are shown, and of the inputs that are judged.
SHOWN, JUDGED, LARGE = 65_536, 8192, 2**26


def loop(kernel: str, mended: bool = False) -> Seen:
    """Compare one function with the honest error of another. mended: with the work-around."""
    return {
        "layer_norm": layer_norm,
        "embedding": embedding,
        "vector_norm": vector_norm,
        "fused_cross_entropy": fused_cross_entropy,
    }[kernel](mended)


def layer_norm(mended: bool) -> Seen:
    """Return rows of 64 numbers in bf16, with a weight and a bias."""
    dtype = torch.float32 if mended else torch.bfloat16

    def mine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x.to(dtype), (64,), weight.to(dtype), bias.to(dtype)).to(x.dtype)

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight + bias

    def inputs(count: int) -> list[Tensor]:
        return [torch.randn(count, 64, generator=seeded()), torch.ones(64), torch.zeros(64)]

    shown = errors_of(mine, plain, inputs(SHOWN), ["", "dweight", "dbias"])
    return Seen(honest(mine, plain, inputs(JUDGED // 2), "bf16", draws=4), shown=shown)


def embedding(mended: bool) -> Seen:
    """Read the words of a text from a bf16 table of 256 words; a few words make up most of the text."""
    dtype = torch.float32 if mended else torch.bfloat16

    def mine(table: Tensor, ids: Tensor) -> Tensor:
        return F.embedding(ids, table.to(dtype)).to(table.dtype)

    def plain(table: Tensor, ids: Tensor) -> Tensor:
        return F.one_hot(ids, 256).to(table.dtype) @ table

    def inputs(count: int) -> list[Tensor]:
        # Word k is 1/k times as frequent as the first.
        words = torch.multinomial(1 / torch.arange(1.0, 257), count, replacement=True, generator=seeded())
        return [torch.randn(256, 32, generator=seeded()), words]

    shown = errors_of(mine, plain, inputs(SHOWN), ["dtable"])
    return Seen(honest(mine, plain, inputs(JUDGED), "bf16", draws=4), shown=shown)


def vector_norm(mended: bool) -> Seen:
    """Take the norm of one large tensor in FP32, as `clip_grad_norm_` does of an embedding's gradient."""

    def mine(x: Tensor) -> Tensor:
        return torch.stack([torch.linalg.vector_norm(x) for x in x.split(2**16)]).norm() if mended else x.norm()

    def plain(x: Tensor) -> Tensor:
        return (x * x).sum().sqrt()

    x = torch.randn(LARGE, generator=seeded())
    exact = sum(float(part.double().square().sum()) for part in x.split(2**22)) ** 0.5
    shown = {"error of the norm": abs(float(mine(x)) / exact - 1)}
    return Seen(honest(mine, plain, [x], "fp32", draws=2, differentiate=False), shown=shown)


def fused_cross_entropy(mended: bool) -> Seen:
    """Judge Liger-Kernel's fused head and loss by Triton's interpreter: one loss per token, weighted by the caller."""
    os.environ["TRITON_INTERPRET"] = "1"
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    def mine(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        return LigerFusedLinearCrossEntropyLoss(reduction="none")(head, x, targets)

    def plain(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(x @ head.T, targets, reduction="none")

    drawn = seeded()
    targets = torch.randint(0, 61, (48,), generator=drawn)
    inputs = [torch.randn(48, 32, generator=drawn), torch.randn(61, 32, generator=drawn), targets]
    return Seen(honest(mine, plain, inputs, "fp32", draws=2), shown=errors_of(mine, plain, inputs, ["dx", "dhead"]))


def honest(mine: Any, plain: Any, inputs: Sequence[Tensor], dtype: str, **settings: Any) -> Any:
    """Return the report, also that of a failure."""
    try:
        return assert_honest(mine, plain, inputs, dtype, **settings)
    except NotHonest as error:
        return error


def errors_of(
    mine: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: Sequence[Tensor], names: Sequence[str]
) -> dict[str, float]:
    """Return relative errors of named gradients, at random output gradients, against the plain function in FP64."""
    dtype = torch.float32 if names == ["dx", "dhead"] else torch.bfloat16
    found = []
    for function, of in ((mine, dtype), (plain, torch.float64)):
        given = [x.to(dtype).to(of, copy=True).requires_grad_() if x.is_floating_point() else x for x in inputs]
        made = function(*given)
        made.backward(torch.randn(made.shape, generator=seeded(1)).to(dtype).to(of))
        found.append([x.grad.double() for x in given if x.grad is not None])
    pairs = zip(names, *found, strict=True)
    return {f"error of {name}": float((a - b).norm() / b.norm()) for name, a, b in pairs if name}


def seeded(seed: int = 0) -> torch.Generator:
    """Return random numbers that are the same in every call."""
    return torch.Generator().manual_seed(seed)
