"""The largest attention logit of each layer. Twin: torch_backend/tools/attention_logits.py."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from lockstep.jax_backend.model import Transformer
from lockstep.jax_backend.policy import Policy

# Queries at a time.
QUERIES = 256


def largest_logits(model: Transformer, tokens_BS: Array, policy: Policy, documents_BS: Array | None) -> Array:
    """Return (layers,): the maximum of q·kᵀ·scale over sequences, heads, queries and the keys that each sees; pure.

    Before a cap.
    """
    apart = documents_BS if documents_BS is not None and model.document_mask else jnp.zeros_like(tokens_BS)
    found: dict[str, Array] = {}
    queries: dict[str, Array] = {}
    heads = {f"blocks.{i}.attn": block.attn for i, block in enumerate(model.blocks)}

    def tap(name: str, value: Array) -> Array:
        block, _, what = name.rpartition(".")
        if what == ("q_rope" if model.rotary else "q"):
            queries[block] = value
        elif what == ("k_rope" if model.rotary else "k"):
            attention = heads[block]
            q, k = (x.reshape(*x.shape[:2], -1, attention.head_dim) for x in (queries.pop(block), value))
            window = model.window if attention.windowed else 0
            found[block] = _largest(q, attention.expand(k), apart, policy, attention.scores.scale, window)
        return value

    model.trunk(tokens_BS, policy, tap, documents_BS)
    return jnp.stack([found[block] for block in heads])


def _largest(q_BSHE: Array, k_BSHE: Array, documents_BS: Array, policy: Policy, scale: float, window: int) -> Array:
    q_BSHE, k_BSHE = policy.round(q_BSHE), policy.round(k_BSHE)
    length = q_BSHE.shape[1]
    largest = jnp.full((), -jnp.inf, q_BSHE.dtype)
    places = jnp.arange(length)
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        logits_BHST = jnp.einsum("bshe,bthe->bhst", q_BSHE[:, start:stop], k_BSHE[:, :stop]) * scale
        ago_ST = places[start:stop, None] - places[None, :stop]
        seen_ST = (ago_ST >= 0) & (ago_ST < (window or length))
        seen_BST = seen_ST & (documents_BS[:, start:stop, None] == documents_BS[:, None, :stop])
        largest = jnp.maximum(largest, jnp.where(seen_BST[:, None], logits_BHST, -jnp.inf).max())
    return largest
