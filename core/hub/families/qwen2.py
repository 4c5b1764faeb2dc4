"""Qwen 2 (`Qwen2ForCausalLM`): Llama with biases on queries, keys and values."""

from __future__ import annotations

from lockstep.core.hub.families.llama import SIZES, TENSORS
from lockstep.core.hub.family import Fixed, HubFamily, Setting

# Every layer sees all tokens before it, as far as these say so.
NO_WINDOW = (
    Fixed("use_sliding_window", False, False),
    Fixed("layer_types", "full_attention", "full_attention", each=True),
)

FAMILY = HubFamily(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    settings=(
        *SIZES,
        Setting("norm_eps", "rms_norm_eps", 1e-6),
        Setting("tied", "tie_word_embeddings", False),
    ),
    fixed=(Fixed("hidden_act", "silu", "silu"), *NO_WINDOW),
    theta=10_000.0,
    tensors=TENSORS,
    dropout=("attention_dropout",),
)
