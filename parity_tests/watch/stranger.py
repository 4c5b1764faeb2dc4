"""A user's model, loss and loop, with nothing of Lockstep but the watcher. The JAX function is the user's as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.core.parity.watch.api import Watcher, watch
from lockstep.jax_backend.watch import JaxReference, reference

VOCAB, WIDTH, HIDDEN, LENGTH, ROWS = 61, 32, 48, 8, 16

Batch = tuple[Tensor, Tensor]


class Tagger(nn.Module):
    """A model of embedding, LayerNorm, causal attention with one head, an MLP with dropout, and logits."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(HIDDEN, VOCAB)

    def attended(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.attended(self.embed(tokens))
        return self.down(self.dropout(F.silu(self.up(x))))


def torch_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1).float(), batch[1].flatten())


def jax_nll(params: dict[str, jax.Array], batch: Any, operand: Any = None) -> jax.Array:
    """Return the NLL (ROWS, LENGTH).

    operand: the dtype of inputs and outputs of matrix products, as under autocast.
    """
    tokens, targets = batch

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return x @ weight.T if operand is None else x.astype(operand) @ weight.astype(operand).T

    x = params["embed.weight"][tokens]
    y = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    y = y * params["norm.weight"] + params["norm.bias"]
    q, k, v = jnp.split(product(y, params["qkv.weight"]), 3, -1)
    scores = jnp.einsum("bqe,bke->bqk", q, k).astype(x.dtype) / WIDTH**0.5
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -jnp.inf)
    probabilities = jax.nn.softmax(scores, -1).astype(v.dtype)
    x = x + jnp.einsum("bqk,bke->bqe", probabilities, v)
    y = product(x, params["up.weight"])
    y = jax.nn.silu(y + params["up.bias"].astype(y.dtype))
    y = product(y, params["down.weight"])
    logits = (y + params["down.bias"].astype(y.dtype)).astype(x.dtype)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]


def jax_loss(params: dict[str, jax.Array], batch: Any, operand: Any = None) -> jax.Array:
    return jax_nll(params, batch, operand).mean()


FP32: JaxReference = reference(jax_loss)
BF16: JaxReference = reference(jax_loss, twin=partial(jax_loss, operand=jnp.bfloat16))


def batches(count: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, VOCAB, (ROWS, LENGTH), generator=generator)
    return [(draw(), draw()) for _ in range(count)]


def nothing(*_: Any) -> None:
    """Plant no fault."""


def train(
    model: nn.Module | None = None,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    data: Sequence[Batch] | None = None,
    *,
    loss: Callable[[nn.Module, Batch], Tensor] = torch_loss,
    spoil: Callable[[nn.Module, torch.optim.Optimizer, int], None] = nothing,
    clip: Callable[[nn.Module], None] | None = None,
    zero_grad: bool = True,
    seed: int = 0,
    autocast: bool = False,
    **settings: Any,
) -> Watcher:
    """Train under `watch`; return the watcher.

    spoil: plants a fault between the backward pass and the watcher's block. settings: those of `watch`.
    """
    torch.manual_seed(seed)
    model = model or Tagger()
    chosen = (optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-3)))(list(model.parameters()))
    watcher = watch(model, chosen, **{"reference": FP32, "every": 1, **settings})
    for number, batch in enumerate(data or batches(3, seed)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = loss(model, batch)
        value.backward()
        spoil(model, chosen, number)
        with watcher.step(batch, value):
            if clip:
                clip(model)
            chosen.step()
        if zero_grad:
            chosen.zero_grad()
    return watcher
