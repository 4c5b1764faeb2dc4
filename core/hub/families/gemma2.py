"""Gemma 2 (`Gemma2ForCausalLM`): its gains are stored as ours are, less 1. Every second layer has a window."""

from __future__ import annotations

from lockstep.core.hub.families.llama import BLOCK, OURS, SIZES, TENSORS
from lockstep.core.hub.family import Fixed, HubFamily, Setting, same

# A block has four norms. The name of Llama's norm before the MLP is here that of the norm after attention.
_NORMS = (
    *same(f"{BLOCK}.post_attention_layernorm", f"{OURS}.attn_post_norm"),
    *same(f"{BLOCK}.pre_feedforward_layernorm", f"{OURS}.mlp_norm"),
    *same(f"{BLOCK}.post_feedforward_layernorm", f"{OURS}.mlp_post_norm"),
)

FAMILY = HubFamily(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    settings=(
        *SIZES,
        Setting("head_width", "head_dim", 256, written="head_dim"),
        Setting("attention_scale", "query_pre_attn_scalar", 256, inverse_root=True, written="score_scale"),
        Setting("window", "sliding_window", 4096),
        Setting("attention_cap", "attn_logit_softcapping", 50.0, null=0.0),
        Setting("logits_cap", "final_logit_softcapping", 30.0, null=0.0),
        Setting("norm_eps", "rms_norm_eps", 1e-6),
        Setting("tied", "tie_word_embeddings", True),
    ),
    fixed=(
        Fixed("attention_bias", False, False),
        Fixed("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh"),
        Fixed("use_bidirectional_attention", False, False),
    ),
    theta=10_000.0,
    tensors=(*(one for one in TENSORS if "post_attention_layernorm" not in one.theirs), *_NORMS),
    dropout=("attention_dropout",),
    layers=("sliding_attention", "full_attention"),
)
