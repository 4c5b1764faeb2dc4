"""GPT-2 (`GPT2LMHeadModel`): Conv1D keeps matrices as (in, out), and q, k and v are one of them."""

from __future__ import annotations

from lockstep.core.hub.family import Fixed, HubFamily, Key, Setting, conv1d, same

_BLOCK, _OURS = "transformer.h.{i}", "blocks.{i}"

FAMILY = HubFamily(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    settings=(
        Setting("vocab_size", "vocab_size"),
        Setting("hidden", "n_embd"),
        Setting("layers", "n_layer"),
        Setting("heads", "n_head"),
        Setting("kv_heads", "n_head"),
        Setting("ffn_hidden", "n_inner", Key("n_embd", times=4)),
        Setting("positions", "n_positions"),
        Setting("norm_eps", "layer_norm_epsilon", 1e-5),
        Setting("tied", "tie_word_embeddings", True),
    ),
    fixed=(
        Fixed("activation_function", "gelu_new", "gelu_new", ("gelu_pytorch_tanh",)),
        Fixed("scale_attn_weights", True, True),
        Fixed("scale_attn_by_inverse_layer_idx", False, False),
        Fixed("reorder_and_upcast_attn", False, False),
    ),
    tensors=(
        *same("transformer.wte", "embed"),
        *same("transformer.wpe", "position"),
        *same(f"{_BLOCK}.ln_1", f"{_OURS}.attn_norm"),
        *conv1d(f"{_BLOCK}.attn.c_attn", *(f"{_OURS}.attn.{one}_proj" for one in "qkv")),
        *conv1d(f"{_BLOCK}.attn.c_proj", f"{_OURS}.attn.o_proj"),
        *same(f"{_BLOCK}.ln_2", f"{_OURS}.mlp_norm"),
        *conv1d(f"{_BLOCK}.mlp.c_fc", f"{_OURS}.mlp.up_proj"),
        *conv1d(f"{_BLOCK}.mlp.c_proj", f"{_OURS}.mlp.down_proj"),
        *same("transformer.ln_f", "final_norm"),
        *same("lm_head", "lm_head"),
    ),
    prefix="transformer.",
    # The causal mask, and the score of a masked position.
    constants=(".attn.bias", ".attn.masked_bias"),
    dropout=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    longest="",
)
