"""Honest pairs: a library's function, or one that computes like a kernel, and a plain one, with random inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Inputs = Callable[[torch.Generator], Sequence[Any]]
ALL = ("bf16", "fp16", "fp32")


def wide(x: Tensor) -> Tensor:
    """Return `x` in FP32, in which a kernel computes internally; FP64 stays FP64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True)
class Kind:
    """A pair of functions, `mine` and `plain`, with their inputs and the dtypes in which to compare them."""

    mine: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: Inputs
    dtypes: tuple[str, ...] = ALL
    options: Mapping[str, Any] = field(default_factory=dict)


def normal(*shapes: tuple[int, ...], spread: float = 0.0) -> Inputs:
    """Return a function that draws normal arrays of these shapes.

    spread: the standard deviation of the logarithm of a random scale per row (last axis); 0: no scale.
    """

    def draw(generator: torch.Generator) -> list[Tensor]:
        found = [torch.randn(shape, generator=generator) for shape in shapes]
        return [x * torch.exp(spread * torch.randn(*x.shape[:-1], 1, generator=generator)) for x in found]

    return draw


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


def attention_wide(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(wide(q), wide(k), wide(v)).to(q.dtype)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(ahead, -math.inf), -1) @ v


def flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def flash_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash(q, k, v, True)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * weight + bias


def layer_norm_of_torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def welford(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute layer norm in FP32 from blocks of 16 columns, whose means and variances are merged one by one."""
    rows = wide(x)
    count, mean, power = 0, rows.new_zeros(*x.shape[:-1], 1), rows.new_zeros(*x.shape[:-1], 1)
    for block in rows.split(16, -1):
        size, of_block = block.shape[-1], block.mean(-1, keepdim=True)
        apart = of_block - mean
        power = (
            power + (block - of_block).square().sum(-1, keepdim=True) + apart.square() * count * size / (count + size)
        )
        mean = mean + apart * size / (count + size)
        count += size
    return ((rows - mean) * torch.rsqrt(power / count + 1e-5) * wide(weight) + wide(bias)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def rms_norm_wide(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(wide(x), wide(weight)).to(x.dtype)


def rms_norm_of_torch(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


def rms_norm_of_llama(x: Tensor, weight: Tensor) -> Tensor:
    """Compute RMS norm as Hugging Face's Llama does: normalise in FP32, round, then multiply by the weight."""
    rows = wide(x)
    return weight * (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def rms_norm_other_order(x: Tensor, weight: Tensor) -> Tensor:
    return x * (torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return -torch.log_softmax(logits, -1).gather(-1, target[:, None]).squeeze(-1)


def mean_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return -torch.log_softmax(wide(logits), -1).gather(-1, target[:, None]).mean()


def logits_and_target(rows: int, classes: int) -> Inputs:
    def draw(generator: torch.Generator) -> list[Tensor]:
        return [
            3 * torch.randn(rows, classes, generator=generator),
            torch.randint(classes, (rows,), generator=generator),
        ]

    return draw


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def swiglu_fused(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(wide(gate)) * wide(up)).to(gate.dtype)


def split_k(a: Tensor, b: Tensor) -> Tensor:
    """Compute a matrix product whose inner axis is split; the parts are added in FP32, in another order."""
    pieces = [wide(x) @ wide(y) for x, y in zip(a.split(24, -1), b.split(24, -2), strict=True)]
    return sum(reversed(pieces), torch.zeros_like(pieces[0])).to(a.dtype)


def summed_one_by_one(x: Tensor) -> Tensor:
    total = wide(x[:, 0])
    for column in wide(x).unbind(-1)[1:]:
        total = total + column
    return total.to(x.dtype)


def jax_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


@jax.jit
def jax_rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    rows = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (rows * jax.lax.rsqrt(jnp.square(rows).mean(-1, keepdims=True) + 1e-5) * weight).astype(x.dtype)


def transposed(generator: torch.Generator) -> list[Tensor]:
    return [
        torch.randn(33, 20, generator=generator).T,
        torch.randn(40, generator=generator)[::2],
        torch.randn(1).expand(20),
    ]


HEADS = normal((2, 3, 40, 16), (2, 3, 56, 16), (2, 3, 56, 16))
SQUARE = normal(*[(1, 2, 65, 24)] * 3)

KINDS = {
    "flash": Kind(flash, attention, HEADS),
    "flash beside one rounding": Kind(flash, attention_wide, HEADS),
    "flash, causal": Kind(flash_causal, causal, SQUARE),
    "attention, larger scores": Kind(flash, attention, lambda g: [4 * x for x in HEADS(g)]),
    "layer norm": Kind(layer_norm_of_torch, layer_norm, normal((60, 48), (48,), (48,)), ("fp32",)),
    "layer norm, forward": Kind(
        layer_norm_of_torch, layer_norm, normal((60, 48), (48,), (48,)), ("bf16", "fp16"), {"differentiate": [0]}
    ),
    "layer norm, plain is torch's": Kind(welford, layer_norm_of_torch, normal((9, 7, 48), (48,), (48,)), ("fp32",)),
    "Welford": Kind(welford, layer_norm, normal((301, 40), (40,), (40,))),
    "Welford, rows of all sizes": Kind(welford, layer_norm, normal((64, 40), (40,), (40,), spread=2.0)),
    "RMS norm": Kind(rms_norm_of_torch, rms_norm, normal((5, 33, 64), (64,))),
    "RMS norm beside one rounding": Kind(rms_norm_of_torch, rms_norm_wide, normal((5, 33, 64), (64,))),
    "RMS norm of Llama": Kind(rms_norm_of_llama, rms_norm, normal((5, 33, 64), (64,))),
    "RMS norm of Llama beside one rounding": Kind(rms_norm_of_llama, rms_norm_wide, normal((5, 33, 64), (64,))),
    "RMS norm, another order": Kind(rms_norm_other_order, rms_norm, normal((5, 33, 64), (64,))),
    "RMS norm, rows of all sizes": Kind(rms_norm_other_order, rms_norm, normal((5, 33, 64), (64,), spread=2.0)),
    "cross entropy": Kind(
        lambda x, y: F.cross_entropy(x, y, reduction="none"), cross_entropy, logits_and_target(50, 77)
    ),
    "mean cross entropy": Kind(lambda x, y: F.cross_entropy(wide(x), y), mean_cross_entropy, logits_and_target(50, 77)),
    "GELU": Kind(F.gelu, gelu, normal((37, 21))),
    "GELU of one number": Kind(F.gelu, gelu, normal((1,))),
    "SwiGLU": Kind(swiglu_fused, swiglu, normal((40, 30), (40, 30))),
    "split-k": Kind(split_k, torch.matmul, normal((30, 100), (100, 20))),
    "split-k, rows of all sizes": Kind(split_k, torch.matmul, normal((30, 100), (100, 20), spread=2.0)),
    "a sum": Kind(summed_one_by_one, lambda x: x.sum(-1), normal((20, 600))),
    "a sum of positive numbers": Kind(
        summed_one_by_one, lambda x: x.sum(-1), lambda g: [torch.rand(20, 600, generator=g)]
    ),
    "JAX": Kind(jax_rms_norm, rms_norm, normal((21, 64), (64,)), options={"mine_in": "jax"}),
    "JAX, attention": Kind(jax_attention, attention, HEADS, options={"mine_in": "jax"}),
    "copy": Kind(torch.clone, lambda x: x * 1, normal((31, 5))),
    "transpose": Kind(lambda x: x.T.contiguous(), lambda x: x.T, normal((31, 5))),
    "strided inputs": Kind(
        lambda x, a, b: torch.addcmul(b[:, None], x, a[:, None]),
        lambda x, a, b: x * a[:, None] + b[:, None],
        transposed,
    ),
}  # fmt: skip


def inputs_of(kind: Kind, seed: int) -> Sequence[Any]:
    return kind.inputs(torch.Generator().manual_seed(seed))
