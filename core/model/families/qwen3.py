"""Qwen 3, dense: Llama's operations, with an RMSNorm of each query and key head (Yang et al. 2025, section 2)."""

from __future__ import annotations

from lockstep.core.model.families.traits import Traits

TRAITS = Traits(qkv_bias=False, o_bias=False, mlp_bias=False, head_norms=True)
