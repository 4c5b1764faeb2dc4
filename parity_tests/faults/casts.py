"""Faults in casts: a rounding that is declared and not done, or done and not declared."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.core.components.cast_plan import FP32
from lockstep.parity_tests.faults.attention import Bf16RopeAttention
from lockstep.parity_tests.faults.planting import Change, backward, bf16, swapped
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.model import Attention, Block, Rope, SwiGLU, Tap, Transformer
from lockstep.torch_backend.precision import Policy
from lockstep.torch_backend.session import TorchSession


class _FusedSwiGLU(SwiGLU):
    def activate(self, gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
        return F.silu(gate_BSF.float()) * up_BSF.float()


class ActivationRoundedOnce(TorchBackend):
    """A fused kernel keeps silu(gate) in FP32, where autocast rounds it."""

    session_class = swapped(SwiGLU, _FusedSwiGLU)


class RopeTablesRounded(TorchBackend):
    """Cos and sin rounded to bf16 under autocast, which keeps them in FP32 (transformers #29285)."""

    session_class = swapped(Attention, Bf16RopeAttention)


class _WideBlock(Block):
    def forward(self, x_BSD: Tensor, rope: Rope, policy: Policy, tap: Tap, name: str) -> Tensor:
        wide = replace(policy, casts=replace(policy.casts, residual=FP32))
        return super().forward(x_BSD, rope, wide, tap, name)


class ResidualLeftInFp32(TorchBackend):
    """The last block keeps its residual stream in FP32, where bf16 is declared."""

    session_class = swapped(Block, _WideBlock, "blocks.1")


class _HalfAway(Block):
    def forward(self, x_BSD: Tensor, rope: Rope, policy: Policy, tap: Tap, name: str) -> Tensor:
        return backward(super().forward(x_BSD, rope, policy, tap, name), _truncated)


def _truncated(grad: Tensor) -> Tensor:
    """Clear the last two mantissa bits of bf16 numbers, which leaves 5."""
    return (grad.float().view(torch.int32) & ~((1 << 18) - 1)).view(torch.float32).to(grad.dtype)


class ResidualGradientCut(TorchBackend):
    """The gradient of a bf16 residual stream loses its last two bits between two blocks."""

    session_class = swapped(Block, _HalfAway, "blocks.0")


class _RoundedTwice(TorchSession):
    def build_model(self) -> Transformer:
        model = super().build_model()
        right = model.fused_loss
        assert right is not None

        def wrong(x: Tensor, weight: Tensor, *others: object) -> tuple[Tensor, Tensor]:
            cut: Change = lambda grad: bf16(grad * 1.003)  # noqa: E731
            loss, nll = right(x, backward(weight, cut), *others)  # type: ignore[arg-type]
            return loss, nll

        model.fused_loss = wrong
        return model


class HeadGradientRoundedTwice(TorchBackend):
    """The gradient of the head's weight is scaled by 1.003 and rounded a second time."""

    session_class = _RoundedTwice
