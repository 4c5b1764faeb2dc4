"""Qwen 3 (`Qwen3ForCausalLM`): Llama with a norm of each head's queries and keys."""

from __future__ import annotations

from lockstep.core.hub.families.llama import BLOCK, OURS, SIZES, TENSORS
from lockstep.core.hub.families.qwen2 import NO_WINDOW
from lockstep.core.hub.family import Fixed, HubFamily, Setting, same

FAMILY = HubFamily(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    settings=(
        *SIZES,
        Setting("head_width", "head_dim", 128, null=0, written="head_dim"),
        Setting("norm_eps", "rms_norm_eps", 1e-6),
        Setting("tied", "tie_word_embeddings", False),
    ),
    fixed=(Fixed("hidden_act", "silu", "silu"), Fixed("attention_bias", False, False), *NO_WINDOW),
    theta=10_000.0,
    tensors=(
        *TENSORS,
        *same(f"{BLOCK}.self_attn.q_norm", f"{OURS}.attn.q_norm"),
        *same(f"{BLOCK}.self_attn.k_norm", f"{OURS}.attn.k_norm"),
    ),
    dropout=("attention_dropout",),
)
