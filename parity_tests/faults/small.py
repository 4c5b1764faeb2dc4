"""Faults that the norm of a whole tensor hides: in a small part of it, or small in all of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.core.backend import Arrays, Batch, NotSupported
from lockstep.parity_tests.faults.gradients import Accumulated
from lockstep.parity_tests.faults.optimizer import OtherMuonSession
from lockstep.parity_tests.faults.own_step import Unmasked
from lockstep.parity_tests.faults.planting import backward, swapped
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.model import Linear, SwiGLU, Tap, Transformer, no_tap
from lockstep.torch_backend.optim import Muon
from lockstep.torch_backend.precision import Policy, linear
from lockstep.torch_backend.session import TorchSession


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return (x.view(torch.int32) & -(1 << 13)).view(torch.float32)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0]


class _CutLogits(Transformer):
    def logits(self, x_BSD: Tensor, policy: Policy) -> Tensor:
        cut: Tensor = _Cut.apply(super().logits(x_BSD, policy))
        return cut


class LogitsCutToTf32(TorchBackend):
    """Logits keep ten bits of mantissa."""

    session_class = swapped(Transformer, _CutLogits)


class _ColumnOff(Transformer):
    def logits(self, x_BSD: Tensor, policy: Policy) -> Tensor:
        logits_BSV = super().logits(x_BSD, policy)
        off = torch.zeros(logits_BSV.shape[-1], device=logits_BSV.device)
        off[7] = 1e-2
        return logits_BSV + off


class OneLogitColumnOff(TorchBackend):
    """The logit of one token of the vocabulary is 0.01 too large."""

    session_class = swapped(Transformer, _ColumnOff)


def _one_doubled(grad: Tensor) -> Tensor:
    size = grad.abs()
    # An element near the root mean square of the tensor: neither the largest nor one close to zero.
    at = (size - size.square().mean().sqrt()).abs().argmin()
    # A mask and not an index: in a compiled program `at` is a tensor, not a number.
    here = torch.arange(grad.numel(), device=grad.device).view_as(grad) == at
    return torch.where(here, 2 * grad, grad)


class _OneElement(Linear):
    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        return linear(x, backward(self.weight, _one_doubled), self.bias, policy, self.float8)


class OneGradientElementDoubled(TorchBackend):
    """One element of a weight's gradient is twice as large."""

    session_class = swapped(Linear, _OneElement, "blocks.1.mlp.up_proj")


class _LongUntapped(SwiGLU):
    def forward(self, x_BSD: Tensor, policy: Policy, tap: Tap, name: str) -> Tensor:
        if tap is not no_tap:
            return super().forward(x_BSD, policy, tap, name)
        act_BSF = self.activate(self.gate_proj(x_BSD, policy), self.up_proj(x_BSD, policy))
        return self.down_proj(act_BSF * 1.002, policy)


class UntappedActivationLong(TorchBackend):
    """An activation is 0.2 % too large, in the program that trains alone."""

    session_class = swapped(SwiGLU, _LongUntapped, "blocks.1.*")


class _Bf16Angles(Transformer):
    def rope_of(self, length: int) -> tuple[Tensor, Tensor]:
        _, head_dim, theta = self.rope
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        places = torch.arange(length, dtype=torch.float64).bfloat16()
        angle = (places[:, None] * (theta**-exponent).bfloat16()).double()
        return torch.cos(angle).to(self.cos.device), torch.sin(angle).to(self.cos.device)


class _NormOfMatrices(TorchSession):
    def _global_norm(self, grads: list[Tensor]) -> Tensor:
        return super()._global_norm([grad for grad in grads if grad.ndim > 1])


class NormLeavesOutGains(TorchBackend):
    """The gradient norm is that of the matrices; gains are left out of it."""

    session_class = _NormOfMatrices


class _NoTaps(TorchSession):
    def observe(self, batch: Batch, taps: Sequence[str]) -> Arrays:
        raise NotSupported("a black box shows no taps")


class BlackBox(TorchBackend):
    """No fault; the session shows only NLL and gradients, no other taps."""

    session_class = _NoTaps


class BlackBoxRopeAnglesInBf16(TorchBackend):
    """RoPE's angles are rounded to bf16, in a session that shows only NLL and gradients."""

    class session_class(_NoTaps, swapped(Transformer, _Bf16Angles)):  # type: ignore[misc]
        pass


def _in_e4m3(grad: Tensor) -> Tensor:
    scale = 448.0 / grad.abs().max()
    return (grad * scale).to(torch.float8_e4m3fn).to(grad.dtype) / scale


class _KeysInE4m3(Linear):
    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        return linear(x, backward(self.weight, _in_e4m3), self.bias, policy, self.float8)


class BlackBoxKeysGradientsInE4m3(TorchBackend):
    """The gradient of the key weights is rounded to e4m3, in a session that shows only NLL and gradients."""

    class session_class(_NoTaps, swapped(Linear, _KeysInE4m3, "blocks.*.attn.k_proj")):  # type: ignore[misc]
        pass


class _SmallSwiGLU(SwiGLU):
    def activate(self, gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
        act_BSF = super().activate(gate_BSF, up_BSF)
        return act_BSF * 1.002 if self.all_count else act_BSF


class _SmallOwnSession(TorchSession):
    def build_model(self) -> Transformer:
        model = super().build_model()
        model.__class__ = Unmasked
        model.blocks[0].mlp.__class__ = _SmallSwiGLU
        return model


class ActivationSlightlyLongWithoutLossMask(TorchBackend):
    """The branch for batches without a loss mask multiplies the first block's activation by 1.002."""

    session_class = _SmallOwnSession


class _OwnGradientsSession(TorchSession):
    def accumulate(self, batch: Batch) -> Accumulated:
        result = super().accumulate(batch)
        if (batch.weights == batch.weights.flat[0]).all():
            self.change({name: p.grad for name, p in self.parameters.items() if p.grad is not None})
        return result

    def change(self, grads: dict[str, Tensor]) -> None:
        """Change gradients in place."""
        for grad in grads.values():
            grad *= 1.002


class GradientsSlightlyLongWhereWeightsAreAlike(TorchBackend):
    """If all loss weights are equal, all gradients are 0.2 % too large."""

    session_class = _OwnGradientsSession


class _OwnRowSession(_OwnGradientsSession):
    def change(self, grads: dict[str, Tensor]) -> None:
        """Change gradients in place."""
        grads["blocks.1.attn.q_proj.weight"][0] = 0


class RowOfQueriesLostWhereWeightsAreAlike(TorchBackend):
    """If all loss weights are equal, the gradient of one row of the second block's query weight is zero."""

    session_class = _OwnRowSession


class _LongMuon(Muon):
    def length(self, rows: int, columns: int) -> float:
        return 1.004 * super().length(rows, columns)


class _LongMuonSession(OtherMuonSession):
    muon = _LongMuon


class MuonSlightlyLong(TorchBackend):
    """Muon's update is 0.4 % too large in every matrix, less than the error of its own rounding to bf16."""

    session_class = _LongMuonSession
