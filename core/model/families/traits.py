"""The traits that distinguish families of decoder-only transformers; sizes are settings of the run file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lockstep.core.config.sections import ModelConfig


@dataclass(frozen=True)
class Traits:
    """The choices that a family fixes, by kinds of operations (core/model/graph.py).

    - norm: `norm` is RMSNorm, `centered_norm` is RMSNorm with the gain 1 + w, `layer_norm` is LayerNorm.
    - rotary: RoPE for queries and keys; else a learned row is added to each token's embedding.
    - activation: `gated` is silu(gate) ⊙ up, `gated_gelu` is gelu(gate) ⊙ up, `gelu` has no gate. GELU is by tanh.
    - qkv_bias, o_bias, mlp_bias: biases of projections; None takes the setting of the run file.
    - head_norms: an RMSNorm of each query head and each key head, before RoPE.
    - post_norms: a norm of the output of attention and of the MLP.
    - scaled_embedding: embeddings are multiplied by √hidden.
    - window_every: `model.window` applies to every block whose number is a multiple of this.
    - narrow_start: the initial standard deviation of all matrices is 0.02 (Radford et al. 2019); else it depends on
      the width of their input. In both cases, projections into the residual stream have a smaller one.
    """

    norm: Literal["norm", "centered_norm", "layer_norm"] = "norm"
    rotary: bool = True
    activation: Literal["gated", "gated_gelu", "gelu"] = "gated"
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    head_norms: bool = False
    post_norms: bool = False
    scaled_embedding: bool = False
    window_every: int = 1
    narrow_start: bool = False

    @property
    def as_llama(self) -> bool:
        """True if the family has Llama's operations; biases, windows and initial weights may differ."""
        own = replace(self, qkv_bias=None, o_bias=None, mlp_bias=None, window_every=1, narrow_start=False)
        return own == Traits()

    def biased(self, model: ModelConfig, projections: Literal["qkv_bias", "o_bias", "mlp_bias"]) -> bool:
        """Return whether projections have biases: fixed by the family, or set in the run file."""
        fixed: bool | None = getattr(self, projections)
        return bool(getattr(model, projections)) if fixed is None else fixed

    @property
    def unread(self) -> frozenset[str]:
        """The fields of `ModelConfig` that the family does not read."""
        of_rope = frozenset({"rope_theta", "rope_factor", "rope_low", "rope_high", "rope_original"})
        fixed = {name for name in ("qkv_bias", "o_bias", "mlp_bias") if getattr(self, name) is not None}
        return (frozenset({"positions"}) if self.rotary else of_rope) | fixed
