"""GPT-2 (Radford et al. 2019): LayerNorm, learned positions, GELU by tanh, all biases, its own initial weights."""

from __future__ import annotations

from lockstep.core.model.families.traits import Traits

TRAITS = Traits(
    norm="layer_norm", rotary=False, activation="gelu", qkv_bias=True, o_bias=True, mlp_bias=True, narrow_start=True
)
