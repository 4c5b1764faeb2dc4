"""The largest attention logit of each layer. Twin: jax_backend/tools/attention_logits.py.

Logits that grow without bound make softmax a choice of one key: attention's entropy collapses, and the loss diverges
soon after (Dehghani et al. 2023, arXiv 2302.05442; Wortsman et al. 2023, arXiv 2309.14322). Fused kernels never show
them, so they are computed once more, a chunk of queries at a time.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lockstep.torch_backend.model import Attention, Block, Transformer
from lockstep.torch_backend.precision import Policy

# Queries at a time: of 32 heads over 8,192 keys, 256 MB of FP32 logits.
QUERIES = 256


def largest_logits(model: Transformer, tokens_BS: Tensor, policy: Policy, *documents_BS: Tensor) -> np.ndarray:
    """Return (layers,) float64: the maximum of q·kᵀ·scale over sequences, heads, queries and the keys that each sees.

    Before a cap. Operands are rounded as attention's are, products and sums in the stream dtype. documents_BS (B, S)
    where attention uses them. The forward pass runs eagerly, without gradients; nothing of the model is changed.
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
    """Reshape queries or keys to (B, S, H, E), from that or from (B, S, H·E)."""
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
