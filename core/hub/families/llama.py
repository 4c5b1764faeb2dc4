"""Llama (transformers' `LlamaForCausalLM`). Its RoPE pairs dimension i with i + E/2, as ours does: nothing moves."""

from __future__ import annotations

from lockstep.core.hub.family import Derived, Fixed, HubFamily, Key, Setting, same

BLOCK, OURS = "model.layers.{i}", "blocks.{i}"

# Settings with equal names, in all of Llama's relatives.
TENSORS = (
    *same("model.embed_tokens", "embed"),
    *same(f"{BLOCK}.input_layernorm", f"{OURS}.attn_norm"),
    *same(f"{BLOCK}.self_attn.q_proj", f"{OURS}.attn.q_proj"),
    *same(f"{BLOCK}.self_attn.k_proj", f"{OURS}.attn.k_proj"),
    *same(f"{BLOCK}.self_attn.v_proj", f"{OURS}.attn.v_proj"),
    *same(f"{BLOCK}.self_attn.o_proj", f"{OURS}.attn.o_proj"),
    *same(f"{BLOCK}.post_attention_layernorm", f"{OURS}.mlp_norm"),
    *same(f"{BLOCK}.mlp.gate_proj", f"{OURS}.mlp.gate_proj"),
    *same(f"{BLOCK}.mlp.up_proj", f"{OURS}.mlp.up_proj"),
    *same(f"{BLOCK}.mlp.down_proj", f"{OURS}.mlp.down_proj"),
    *same("model.norm", "final_norm"),
    *same("lm_head", "lm_head"),
)
SIZES = (
    Setting("vocab_size", "vocab_size"),
    Setting("hidden", "hidden_size"),
    Setting("layers", "num_hidden_layers"),
    Setting("heads", "num_attention_heads"),
    Setting("kv_heads", "num_key_value_heads", Key("num_attention_heads")),
    Setting("ffn_hidden", "intermediate_size"),
)

FAMILY = HubFamily(
    name="llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    settings=(
        *SIZES,
        Setting("norm_eps", "rms_norm_eps", 1e-6),
        Setting("tied", "tie_word_embeddings", False),
        # One flag for four projections.
        Setting("qkv_bias", "attention_bias", False),
        Setting("o_bias", "attention_bias", False),
        Setting("mlp_bias", "mlp_bias", False),
    ),
    fixed=(Fixed("hidden_act", "silu", "silu", ("swish",)),),
    derived=(Derived("head_dim", "head_dim"),),
    theta=10_000.0,
    tensors=TENSORS,
    constants=("rotary_emb.inv_freq",),
    dropout=("attention_dropout",),
)
