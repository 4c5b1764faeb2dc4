"""Faults in the forward pass after the final norm: logits, per-token NLL, and the loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.core.backend import Batch
from lockstep.parity_tests.faults.gradients import OneGradientScaled
from lockstep.parity_tests.faults.planting import bf16, swapped
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.model import Transformer
from lockstep.torch_backend.precision import Policy
from lockstep.torch_backend.session import TorchSession

# Tests run this one as a candidate by the name `loss.py:OneGradientScaled`.
__all__ = ["OneGradientScaled"]


class _Bf16Logits(Transformer):
    def logits(self, x_BSD: Tensor, policy: Policy) -> Tensor:
        return bf16(super().logits(x_BSD, policy))


class LogitsRoundedToBf16(TorchBackend):
    """Logits leave the head in bf16."""

    session_class = swapped(Transformer, _Bf16Logits)


class _NotShiftedSession(TorchSession):
    def to_device(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        tokens, _, weights = super().to_device(batch)
        return tokens, tokens, weights


class TargetsNotShifted(TorchBackend):
    """The target of each token is the token itself (transformers #47394)."""

    session_class = _NotShiftedSession


class _PaddedVocabulary(Transformer):
    def nll(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        return super().nll(F.pad(logits_BSV, (0, -logits_BSV.shape[-1] % 384)), targets_BS)


class VocabularyPaddingCounts(TorchBackend):
    """The columns that fill the vocabulary up to whole blocks of 384 enter the log-sum-exp (verl #5349)."""

    session_class = swapped(Transformer, _PaddedVocabulary)


class _WrappingIndex(Transformer):
    def nll(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        flat = logits_BSV.flatten()
        rows = torch.arange(targets_BS.numel(), device=flat.device).view_as(targets_BS)
        chosen_BS = flat[(rows * logits_BSV.shape[-1] + targets_BS) % (flat.numel() // 2)]
        return (torch.logsumexp(logits_BSV.double(), -1) - chosen_BS.double()).to(logits_BSV.dtype)


class LateRowsReadEarlyLogits(TorchBackend):
    """The index into all logits overflows half-way: late rows read early ones' logits (pytorch #111484)."""

    session_class = swapped(Transformer, _WrappingIndex)


class _Bf16Nll(Transformer):
    def nll(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        likelihoods_BSV = logits_BSV.bfloat16().log_softmax(-1)
        return -likelihoods_BSV.gather(-1, targets_BS[..., None])[..., 0].to(logits_BSV.dtype)


class NllInBf16(TorchBackend):
    """Log-softmax in bf16, as under autocast without an exception for the loss."""

    session_class = swapped(Transformer, _Bf16Nll)


class _Smoothed(Transformer):
    def nll(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        chosen_BS = logits_BSV.gather(-1, targets_BS[..., None])[..., 0]
        return super().nll(logits_BSV, targets_BS) + 0.001 * (chosen_BS - logits_BSV.mean(-1))


class LabelSmoothingLeftOn(TorchBackend):
    """A thousandth of the target's probability is spread over the vocabulary."""

    session_class = swapped(Transformer, _Smoothed)


class _MeanOfMeansSession(TorchSession):
    def micro_loss(
        self, tokens: Tensor, targets: Tensor, weights: Tensor, total: Tensor, *documents: Tensor
    ) -> tuple[Tensor, Tensor]:
        nll = self.model(tokens, targets, self.policy, *documents)
        return (nll * weights).sum() / weights.sum() / self.config.train.accumulation, nll


class MeanOfMicroBatchMeans(TorchBackend):
    """Accumulation averages the micro-batches' means (transformers #34191)."""

    session_class = _MeanOfMeansSession


class _UnweightedSession(TorchSession):
    def micro_loss(
        self, tokens: Tensor, targets: Tensor, weights: Tensor, total: Tensor, *documents: Tensor
    ) -> tuple[Tensor, Tensor]:
        nll = self.model(tokens, targets, self.policy, *documents)
        return (nll * (weights > 0)).sum() / total, nll


class LossWeightsIgnored(TorchBackend):
    """A loss weight of one half counts as one."""

    session_class = _UnweightedSession


class _PenaltySession(TorchSession):
    def micro_loss(
        self, tokens: Tensor, targets: Tensor, weights: Tensor, total: Tensor, *documents: Tensor
    ) -> tuple[Tensor, Tensor]:
        loss, nll = super().micro_loss(tokens, targets, weights, total, *documents)
        return loss + 2e-6 * self.parameters["embed.weight"].double().square().sum(), nll


class PenaltyLeftIn(TorchBackend):
    """A penalty on the embedding's length is left in the loss."""

    session_class = _PenaltySession
