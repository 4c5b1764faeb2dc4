"""Mistral 7B: Llama's operations, with a sliding window of `model.window` tokens (Jiang et al. 2023, table 1)."""

from __future__ import annotations

from lockstep.core.model.families.traits import Traits

TRAITS = Traits(qkv_bias=False, o_bias=False, mlp_bias=False)
