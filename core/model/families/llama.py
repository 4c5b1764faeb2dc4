"""Llama 2 and 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU (Grattafiori et al. 2024, section 3.2).

Llama 3.1 and later divide RoPE's low frequencies: `model.rope_factor`, `rope_low`, `rope_high` and `rope_original`.
"""

from __future__ import annotations

from lockstep.core.model.families.traits import Traits

TRAITS = Traits()
