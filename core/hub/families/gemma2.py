"""Gemma 2 (`Gemma2ForCausalLM`). Not in HUB yet.

Its norms multiply by 1 + weight, its embeddings by √hidden, and every second layer sees a window. To be settled with
our model: `attention_scale` is 1 / √query_pre_attn_scalar, which is no setting both ways by equal values.
"""

from __future__ import annotations

from lockstep.core.hub.families.llama import BLOCK, OURS, SIZES, TENSORS
from lockstep.core.hub.family import Fixed, HubFamily, Setting, same

# A block has four norms: what Llama calls the norm before the MLP is the one after attention here.
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
        Setting("head_width", "head_dim", 256),
        Setting("window", "sliding_window", 4096, null=0),
        Setting("attention_cap", "attn_logit_softcapping", 50.0, null=0.0),
        Setting("logits_cap", "final_logit_softcapping", 30.0, null=0.0),
        Setting("norm_eps", "rms_norm_eps", 1e-6),
        Setting("tied", "tie_word_embeddings", True),
        Setting("qkv_bias", "attention_bias", False),
        Setting("o_bias", "attention_bias", False),
    ),
    given={"mlp_bias": False},
    fixed=(
        Fixed("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh"),
        Fixed("use_bidirectional_attention", False, False),
    ),
    theta=10_000.0,
    tensors=(*(one for one in TENSORS if "post_attention_layernorm" not in one.theirs), *_NORMS),
    dropout=("attention_dropout",),
)
