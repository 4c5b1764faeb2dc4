"""Faults between logits and accumulated gradients."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from core.backend import Batch
from parity_tests.faults.forward import swap
from torch_backend.model import Llama
from torch_backend.precision import Policy
from torch_backend.session import TorchBackend, TorchSession


class _NotShiftedSession(TorchSession):
    def to_device(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        tokens, _, weights = super().to_device(batch)
        return tokens, tokens, weights


class TargetsNotShifted(TorchBackend):
    """The target of each token is the token itself (transformers #47394)."""

    session_class = _NotShiftedSession


class _MeanOfMeansSession(TorchSession):
    def micro_loss(self, tokens: Tensor, targets: Tensor, weights: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        nll = self.model(tokens, targets, self.policy)
        return (nll * weights).sum() / weights.sum() / self.config.train.accumulation, nll


class MeanOfMicroBatchMeans(TorchBackend):
    """Accumulation averages the micro-batches' means (transformers #34191)."""

    session_class = _MeanOfMeansSession


class _UnweightedSession(TorchSession):
    def micro_loss(self, tokens: Tensor, targets: Tensor, weights: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        nll = self.model(tokens, targets, self.policy)
        return (nll * (weights > 0)).sum() / total, nll


class LossWeightsIgnored(TorchBackend):
    """A loss weight of one half counts as one (Liger #1298)."""

    session_class = _UnweightedSession


class _ScaledSession(TorchSession):
    def accumulate(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        result = super().accumulate(batch)
        gradient = self.parameters["blocks.0.mlp.down_proj.weight"].grad
        assert gradient is not None
        gradient.mul_(1.05)
        return result


class OneGradientScaled(TorchBackend):
    """One gradient a twentieth too long."""

    session_class = _ScaledSession


class _HalfHead(Llama):
    def logits(self, x_BSD: Tensor, policy: Policy) -> Tensor:
        weight = (self.lm_head or self.embed).weight
        return F.linear(
            x_BSD.to(policy.operand).to(policy.stream), weight.to(policy.operand).to(policy.stream).detach()
        )


class _HalfHeadSession(TorchSession):
    def build_model(self) -> Llama:
        return swap(super().build_model(), Llama, _HalfHead)


class HeadWithoutGradient(TorchBackend):
    """The head gives its weight no gradient: with a tied head the embedding's lacks a half (verl #7835)."""

    session_class = _HalfHeadSession


class _MissingSession(TorchSession):
    def accumulate(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        result = super().accumulate(batch)
        self.parameters["final_norm.weight"].grad = None
        return result


class GradientMissing(TorchBackend):
    """One parameter gets no gradient at all (pytorch #112583)."""

    session_class = _MissingSession
