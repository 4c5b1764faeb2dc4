"""Qwen 2 and 2.5: Llama's operations, with biases of queries, keys and values (Yang et al. 2024, section 2.2)."""

from __future__ import annotations

from lockstep.core.model.families.traits import Traits

TRAITS = Traits(qkv_bias=True, o_bias=False, mlp_bias=False)
