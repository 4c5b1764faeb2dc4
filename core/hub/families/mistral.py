"""Mistral (`MistralForCausalLM`): Llama whose tokens see a window of those before."""

from __future__ import annotations

from lockstep.core.hub.families.llama import SIZES, TENSORS
from lockstep.core.hub.family import Fixed, HubFamily, Setting

FAMILY = HubFamily(
    name="mistral",
    architecture="MistralForCausalLM",
    model_type="mistral",
    settings=(
        *SIZES,
        Setting("head_width", "head_dim", 0, null=0, written="head_dim"),
        # A token sees itself and the window − 1 tokens before.
        Setting("window", "sliding_window", 4096, null=0),
        Setting("norm_eps", "rms_norm_eps", 1e-6),
        Setting("tied", "tie_word_embeddings", False),
    ),
    fixed=(Fixed("hidden_act", "silu", "silu"),),
    theta=10_000.0,
    tensors=TENSORS,
    dropout=("attention_dropout",),
)
