"""Faults in a single block of a model that is too large for docs/results/faults.md (see docs/results/scale.md)."""

from __future__ import annotations

from lockstep.parity_tests.faults.attention import Bf16RopeAttention
from lockstep.parity_tests.faults.backward import RecomputingSwiGLU
from lockstep.parity_tests.faults.planting import swapped
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.model import Attention, SwiGLU


class RopeInBf16InBlock11(TorchBackend):
    """RoPE's cos and sin are rounded to bf16, only in block 11."""

    session_class = swapped(Attention, Bf16RopeAttention, "blocks.11.attn")


class SwiGLUBackwardInBlock3(TorchBackend):
    """SwiGLU's backward pass recomputes the activation in bf16, only in block 3."""

    session_class = swapped(SwiGLU, RecomputingSwiGLU, "blocks.3.mlp")
