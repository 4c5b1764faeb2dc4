"""Hugging Face's Llama, built by hand, as a candidate in ten lines; `--candidate hf` does as much without a file.

    lockstep parity configs/quickstart.toml --precision.policy fp32 --compile.enabled false \
        --candidate docs/examples/hf_llama.py:HfLlama
"""

from transformers import LlamaConfig, LlamaForCausalLM

from lockstep import HuggingFaceCandidate


class HfLlama(HuggingFaceCandidate):
    def build(self, config):
        m, rope = config.model, {"rope_type": "default", "rope_theta": config.model.rope_theta}
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=m.vocab_size, hidden_size=m.hidden, num_hidden_layers=m.layers, num_attention_heads=m.heads,
            num_key_value_heads=m.kv_heads, intermediate_size=m.ffn_hidden, rms_norm_eps=m.norm_eps,
            rope_parameters=rope, tie_word_embeddings=m.tied, max_position_embeddings=config.train.sequence_length,
        ))  # fmt: skip
