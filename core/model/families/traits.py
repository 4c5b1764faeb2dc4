"""The traits that tell one family of decoder-only transformers from another; numbers stand in the run file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lockstep.core.config.sections import ModelConfig


@dataclass(frozen=True)
class Traits:
    """The choices that a family fixes, by kinds of operations (core/model/graph.py).

    norm: `norm` is RMSNorm, `centered_norm` RMSNorm with the gain 1 + w, `layer_norm` takes the mean away and has a
    bias. rotary: queries and keys turn by their position; if not, a learned row is added to each token's embedding.
    activation: `gated` is silu(gate) ⊙ up, `gated_gelu` gelu(gate) ⊙ up, `gelu` has no gate; GELU by tanh. qkv_bias,
    o_bias, mlp_bias: biases of projections; None: as the run file has them. head_norms: an RMSNorm of each query head
    and each key head before they turn. post_norms: a norm of what attention and MLP add to the residual stream.
    scaled_embedding: embeddings times √hidden. window_every: `model.window` holds in the first of so many blocks.
    narrow_start: all matrices start with one standard deviation, 0.02 (Radford et al. 2019); if not, it falls with the
    width of their input.
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
        """Return whether a family has Llama's operations; biases, window and first weights may differ."""
        own = replace(self, qkv_bias=None, o_bias=None, mlp_bias=None, window_every=1, narrow_start=False)
        return own == Traits()

    def biased(self, model: ModelConfig, projections: Literal["qkv_bias", "o_bias", "mlp_bias"]) -> bool:
        """Return whether projections have biases: by the family, or else by the run file."""
        fixed: bool | None = getattr(self, projections)
        return bool(getattr(model, projections)) if fixed is None else fixed

    @property
    def unread(self) -> frozenset[str]:
        """Return the fields of `ModelConfig` that a family does not read."""
        of_rope = frozenset({"rope_theta", "rope_factor", "rope_low", "rope_high", "rope_original"})
        fixed = {name for name in ("qkv_bias", "o_bias", "mlp_bias") if getattr(self, name) is not None}
        return (frozenset({"positions"}) if self.rotary else of_rope) | fixed
