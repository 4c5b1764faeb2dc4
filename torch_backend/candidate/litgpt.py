"""litgpt's GPT as a candidate: `lockstep parity CONFIG --candidate litgpt`. Tested with litgpt 0.5.13."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.families import traits_of
from lockstep.torch_backend.candidate.layout import Fused, fused
from lockstep.torch_backend.candidate.module import ModuleCandidate


class LitGptCandidate(ModuleCandidate):
    """litgpt's Llama, with q, k and v in one module.

    Versions before 0.5.4 interleave the heads, in a module of another name: `"transformer.h.{i}.attn.attn": fused(…,
    by_group=True)`.
    """

    name = "litgpt"
    taps_keep_bits = True
    modules: Mapping[str, str | Sequence[str] | Fused] = {
        "transformer.wte": "embed",
        "transformer.h.{i}.norm_1": "attn_norm",
        "transformer.h.{i}.attn.qkv": fused("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "transformer.h.{i}.attn.proj": "attn.o_proj",
        "transformer.h.{i}.norm_2": "mlp_norm",
        "transformer.h.{i}.mlp.fc_1": "mlp.gate_proj",
        "transformer.h.{i}.mlp.fc_2": "mlp.up_proj",
        "transformer.h.{i}.mlp.proj": "mlp.down_proj",
        "transformer.ln_f": "final_norm",
        "lm_head": "lm_head",
    }

    def build(self, config: RunConfig) -> nn.Module:
        """Build the model of the run's settings, with a tied head if `model.tied` is set."""
        from litgpt import GPT, Config

        m = config.model
        made = Config(
            block_size=config.train.longest, vocab_size=m.vocab_size, padded_vocab_size=m.vocab_size,
            n_layer=m.layers, n_embd=m.hidden, n_head=m.heads, n_query_groups=m.kv_heads, head_size=m.head_dim,
            intermediate_size=m.ffn_hidden, norm_class_name="RMSNorm", norm_eps=m.norm_eps, mlp_class_name="LLaMAMLP",
            parallel_residual=False, bias=False, attn_bias=traits_of(m).biased(m, "qkv_bias"), rotary_percentage=1.0,
            rope_base=m.rope_theta, rope_adjustments=_adjustments(config),
        )  # fmt: skip
        model: Any = GPT(made)
        if m.tied:
            model.transformer.wte.weight = model.lm_head.weight
        whole: nn.Module = model
        return whole

    def calls_of(self, config: RunConfig) -> Mapping[Callable[..., Any], Sequence[str]]:
        """Return `calls`, and RoPE, which litgpt calls once for queries and once for keys."""
        from litgpt.model import apply_rope

        return {**self.calls, apply_rope: ("attn.q_rope", "attn.k_rope")}

    def require(self, config: RunConfig) -> None:
        """Raise UserError if litgpt is not installed, or if the model is not a Llama that litgpt can express."""
        super().require(config)
        try:
            import litgpt  # noqa: F401
        except ImportError as error:
            raise UserError("litgpt is not installed: pip install litgpt") from error
        m = config.model
        if not traits_of(m).as_llama or m.window or m.o_bias or m.mlp_bias or m.head_width not in (0, m.head_dim):
            raise UserError("--candidate litgpt computes Llama (and Qwen 2), without windows or other biases")

    def describe(self, config: RunConfig) -> Mapping[str, Any]:
        """Extend the base class's description with litgpt's version."""
        self.require(config)
        found = super().describe(config)
        return {**found, "versions": {**found["versions"], "litgpt": importlib.metadata.version("litgpt")}}


def _adjustments(config: RunConfig) -> dict[str, Any] | None:
    """Return litgpt's settings for the scaling of low RoPE frequencies; None without scaling."""
    m = config.model
    if m.rope_factor == 1:
        return None
    return {
        "factor": m.rope_factor,
        "low_freq_factor": m.rope_low,
        "high_freq_factor": m.rope_high,
        "original_max_seq_len": m.rope_original,
    }
