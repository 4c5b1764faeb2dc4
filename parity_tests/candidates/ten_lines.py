"""User models as candidates, as docs/guide/candidates.md shows them."""

from lockstep import ModuleCandidate, fused
from lockstep.parity_tests.candidates.foreign import Gpt, Llama, turned


class MyGpt(ModuleCandidate):
    modules = {
        "wte": "embed", "positions": "position.weight", "norm": "final_norm", "out": "lm_head",
        "blocks.{i}.ln1": "attn_norm", "blocks.{i}.qkv": fused("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "blocks.{i}.proj": "attn.o_proj", "blocks.{i}.ln2": "mlp_norm",
        "blocks.{i}.up": "mlp.up_proj", "blocks.{i}.down": "mlp.down_proj",
    }  # fmt: skip

    def build(self, config):
        return Gpt(config.model.vocab_size, config.model.hidden, config.model.layers, config.model.heads, 32)


class MyLlama(ModuleCandidate):
    modules = {
        "wte": "embed", "norm": "final_norm", "out": "lm_head", "blocks.{i}.before": "attn_norm",
        "blocks.{i}.qkv": fused("attn.q_proj", "attn.k_proj", "attn.v_proj", by_group=True, neighbours=True),
        "blocks.{i}.proj": "attn.o_proj", "blocks.{i}.between": "mlp_norm",
        "blocks.{i}.gate_up": fused("mlp.gate_proj", "mlp.up_proj"), "blocks.{i}.down": "mlp.down_proj",
    }  # fmt: skip
    calls = {turned: ("attn.q_rope", "attn.k_rope")}

    def build(self, config):
        m = config.model
        return Llama(m.vocab_size, m.hidden, m.layers, m.heads, m.kv_heads, m.ffn_hidden, m.norm_eps, m.rope_theta)
