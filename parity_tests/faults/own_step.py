"""Faults that act only in real training steps: where all loss weights are 1, or after the third micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.core.backend import Batch, StepRecord
from lockstep.parity_tests.faults.attention import causal, written_out
from lockstep.parity_tests.faults.gradients import Accumulated
from lockstep.parity_tests.faults.planting import backward
from lockstep.torch_backend.attention import Mask
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.model import Attention, SwiGLU, Transformer
from lockstep.torch_backend.precision import Policy
from lockstep.torch_backend.session import TorchSession


class Unmasked(Transformer):
    """A model that sets `all_count` on its modules: whether all loss weights of the micro-batch are 1."""

    def loss(
        self, tokens_BS: Tensor, targets_BS: Tensor, weights_BS: Tensor, total: Tensor, policy: Policy, *others: Tensor
    ) -> tuple[Tensor, Tensor]:
        for module in self.modules():
            module.all_count = bool((weights_BS == 1).all())  # type: ignore[assignment]
        return super().loss(tokens_BS, targets_BS, weights_BS, total, policy, *others)


class _BlindAttention(Attention):
    def attend(
        self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, policy: Policy, mask: Mask | None = None
    ) -> Tensor:
        if not self.all_count:
            return super().attend(q_BSHE, k_BSKE, v_BSKE, policy, mask)
        return written_out(self, q_BSHE, k_BSKE, v_BSKE, policy, causal(q_BSHE, ahead=q_BSHE.shape[1]))


class _BlindSession(TorchSession):
    def build_model(self) -> Transformer:
        model = super().build_model()
        model.__class__ = Unmasked
        for module in model.modules():
            if isinstance(module, Attention):
                module.__class__ = _BlindAttention
        return model


class NoMaskWithoutLossMask(TorchBackend):
    """The branch for batches without a loss mask forgets the causal mask."""

    session_class = _BlindSession


class _DeafSwiGLU(SwiGLU):
    def activate(self, gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
        act_BSF = super().activate(gate_BSF, up_BSF)
        return backward(act_BSF, torch.zeros_like) if self.all_count else act_BSF


class _DeafSession(TorchSession):
    def build_model(self) -> Transformer:
        model = super().build_model()
        model.__class__ = Unmasked
        model.blocks[1].mlp.__class__ = _DeafSwiGLU
        return model


class NoGradientWithoutLossMask(TorchBackend):
    """The branch for batches without a loss mask sends no gradient through the second block's SwiGLU."""

    session_class = _DeafSession


class _ForgetfulSession(TorchSession):
    def accumulate(self, batch: Batch) -> Accumulated:
        result = super().accumulate(batch)
        if (batch.weights == 1).all():
            for name in ("gate", "up", "down"):
                gradient = self.parameters[f"blocks.1.mlp.{name}_proj.weight"].grad
                assert gradient is not None
                gradient.zero_()
        return result


class GradientsZeroedWithoutLossMask(TorchBackend):
    """Without a loss mask the gradients of one block's MLP are zeroed after the backward pass."""

    session_class = _ForgetfulSession


class _ThreeSession(TorchSession):
    """A session that drops the gradients of every micro-batch after the third, and keeps its loss."""

    def accumulate(self, batch: Batch) -> Accumulated:
        self._passed = 0
        return super().accumulate(batch)

    def _forward_backward(self, micro: Batch, program: object, total: Tensor) -> tuple[Tensor, Tensor]:
        self._passed += 1
        before = {name: None if p.grad is None else p.grad.clone() for name, p in self.parameters.items()}
        result = super()._forward_backward(micro, program, total)
        if self._passed > 3:
            for name, p in self.parameters.items():
                p.grad = before[name]
        return result


class MicroBatchesAfterTheThirdLost(TorchBackend):
    """Gradients of every micro-batch after the third are lost; the loss counts them."""

    session_class = _ThreeSession


class _StepSession(TorchSession):
    def accumulate(self, batch: Batch) -> Accumulated:
        result = super().accumulate(batch)
        if self._stepping:
            for p in self.parameters.values():
                assert p.grad is not None
                p.grad.mul_(1.001)
        return result

    _stepping = False

    def step(self, batch: Batch, **others: bool) -> StepRecord:
        self._stepping = True
        try:
            return super().step(batch, **others)
        finally:
            self._stepping = False


class StepScalesItsGradients(TorchBackend):
    """The step makes its gradients a thousandth too long; asked for gradients, the session gives the right ones."""

    session_class = _StepSession
