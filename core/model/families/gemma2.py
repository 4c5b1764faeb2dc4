"""Gemma 2 (Riviere et al. 2024, section 2): norms before and after attention and MLP, GeGLU, alternating windows.

The settings of the caps are `model.attention_cap` and `model.logits_cap`.
"""

from __future__ import annotations

from lockstep.core.model.families.traits import Traits

TRAITS = Traits(
    norm="centered_norm",
    activation="gated_gelu",
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    post_norms=True,
    scaled_embedding=True,
    window_every=2,
)
