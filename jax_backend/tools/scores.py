"""Score each token for evaluation. Twin: torch_backend/tools/scores.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from lockstep.jax_backend.loss import negative_log_likelihood
from lockstep.jax_backend.model import Transformer
from lockstep.jax_backend.policy import Policy


def scores(
    model: Transformer, chunk: int, tokens_BS: Array, targets_BS: Array, policy: Policy, *documents_BS: Array
) -> tuple[Array, Array]:
    """Return per-token NLL (B, S) without z-loss, and whether the likeliest token is the target (B, S); pure.

    Logits are made for at most `chunk` tokens at a time: for a piece of every sequence, so that sequences which are cut
    over devices stay there. There is at least one token of each.
    """
    x_BSD = model.trunk(tokens_BS, policy, model.tap, *documents_BS)
    rows, length = targets_BS.shape
    piece = max(1, min(chunk // rows, length))
    count = -(-length // piece)

    def pieces(x: Array) -> Array:
        """Cut x (B, S, …) into (count, B, piece, …), zeros after the end."""
        short = ((0, 0), (0, count * piece - length), *((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(jnp.pad(x, short).reshape(rows, count, piece, *x.shape[2:]), 1, 0)

    def scored(part: tuple[Array, Array]) -> tuple[Array, Array]:
        logits = model.cap(model.logits(part[0], policy))
        return negative_log_likelihood(logits, part[1]), logits.argmax(-1) == part[1]

    found = jax.lax.map(scored, (pieces(x_BSD), pieces(targets_BS)))
    nll, top1 = (jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :length] for x in found)
    return nll, top1
