"""The largest attention logit of each layer. Twin: jax_backend/tools/attention_logits.py.

If attention logits grow without bound, softmax selects a single key: the entropy of attention collapses, and the loss
diverges soon after (Dehghani et al. 2023, arXiv 2302.05442; Wortsman et al. 2023, arXiv 2309.14322). Fused kernels do
not return logits, so they are computed separately, a chunk of queries at a time.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lockstep.torch_backend.model import Attention, Block, Transformer
from lockstep.torch_backend.precision import Policy

# Queries of a chunk: for 32 heads and 8,192 keys, its FP32 logits take 256 MB.
QUERIES = 256


def largest_logits(model: Transformer, tokens_BS: Tensor, policy: Policy, *documents_BS: Tensor) -> np.ndarray:
    """Return (layers,) float64: the maximum of q·kᵀ·scale over sequences, heads, queries and their visible keys.

    The logits are those before a cap. Operands are rounded as in attention; products and sums have the stream dtype.
    The forward pass runs eagerly, without gradients, and does not change the model. documents_BS: document ids (B, S),
    if attention uses them.
    """
    apart = documents_BS[0] if documents_BS and model.document_mask else torch.zeros_like(tokens_BS)
    found: dict[str, Tensor] = {}
    queries: dict[str, Tensor] = {}
    heads: dict[str, Attention] = {f"blocks.{i}.attn": _attention(block) for i, block in enumerate(model.blocks)}

    def tap(name: str, value: Tensor) -> Tensor:
        block, _, what = name.rpartition(".")
        if what == ("q_rope" if model.rotary else "q"):
            queries[block] = value
        elif what == ("k_rope" if model.rotary else "k"):
            attention = heads[block]
            q, k = (by_heads(x, attention.head_dim) for x in (queries.pop(block), value))
            window = model.window if attention.windowed else 0
            found[block] = _largest(q, attention.expand(k), apart, policy, attention.kernel.scale, window)
        return value

    with torch.no_grad():
        model.trunk(tokens_BS, policy, tap, *documents_BS)
    largest: np.ndarray = torch.stack([found[block] for block in heads]).double().cpu().numpy()
    return largest


def _attention(block: torch.nn.Module) -> Attention:
    assert isinstance(block, Block)
    return block.attn


def by_heads(x: Tensor, head_dim: int) -> Tensor:
    """Reshape queries or keys (B, S, H·E) to (B, S, H, E); return a 4-d tensor unchanged."""
    return x if x.ndim == 4 else x.unflatten(-1, (-1, head_dim))


def _largest(
    q_BSHE: Tensor, k_BSHE: Tensor, documents_BS: Tensor, policy: Policy, factor: float | None, window: int
) -> Tensor:
    q_BHSE, k_BHSE = (x.to(policy.operand).to(policy.stream).transpose(1, 2) for x in (q_BSHE, k_BSHE))
    length, scale = q_BHSE.shape[2], factor or 1.0 / math.sqrt(q_BHSE.shape[-1])
    largest = q_BHSE.new_full((), -math.inf)
    places = torch.arange(length, device=q_BHSE.device)
    for q_HSE, k_HSE, documents_S in zip(q_BHSE, k_BHSE, documents_BS, strict=True):
        for start in range(0, length, QUERIES):
            stop = min(start + QUERIES, length)
            logits_HST = (q_HSE[:, start:stop] @ k_HSE[:, :stop].transpose(1, 2)) * scale
            unseen_ST = places[start:stop, None] < places[:stop]
            unseen_ST |= documents_S[start:stop, None] != documents_S[:stop]
            if window:
                unseen_ST |= places[start:stop, None] - places[:stop] >= window
            largest = torch.maximum(largest, logits_HST.masked_fill_(unseen_ST, -math.inf).amax())
    return largest
