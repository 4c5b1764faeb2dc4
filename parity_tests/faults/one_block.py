"""Faults of a single block, deep in a model that is too large for the boards (docs/results/scale.md)."""

from __future__ import annotations

from lockstep.parity_tests.faults.attention import Bf16RopeAttention
from lockstep.parity_tests.faults.backward import RecomputingSwiGLU
from lockstep.parity_tests.faults.planting import swapped
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.model import Attention, SwiGLU


class RopeInBf16InBlock11(TorchBackend):
    """RoPE's cos and sin rounded to bf16, in block 11 alone."""

    session_class = swapped(Attention, Bf16RopeAttention, "blocks.11.attn")


class SwiGLUBackwardInBlock3(TorchBackend):
    """SwiGLU's backward recomputes the activation in bf16, in block 3 alone."""

    session_class = swapped(SwiGLU, RecomputingSwiGLU, "blocks.3.mlp")
