"""Faults of `evaluate`, which make the validation loss wrong, in trainers whose steps are right."""

from __future__ import annotations

import numpy as np
import torch

from lockstep.core.backend import Arrays, Batch
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession


class _ScalingSession(TorchSession):
    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        found = super().evaluate(batch, policy)
        return {**found, "nll": (found["nll"] * 0.97).astype(found["nll"].dtype)}


class NllScaledInEvaluation(TorchBackend):
    """Evaluation divides by more tokens than it has: its NLL is 3 % too small."""

    session_class = _ScalingSession


class _DroppingSession(TorchSession):
    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        def drop(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(out, 0.1)

        hook = self.model.get_submodule("blocks.0.mlp.down_proj").register_forward_hook(drop)
        try:
            return super().evaluate(batch, policy)
        finally:
            hook.remove()


class DropoutLeftOnInEvaluation(TorchBackend):
    """The model is not switched to evaluation: a tenth of the first MLP's output is dropped."""

    session_class = _DroppingSession


class _ShortSession(TorchSession):
    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        return {name: scores[:, :-1] for name, scores in super().evaluate(batch, policy).items()}


class LastTokensLeftOutOfEvaluation(TorchBackend):
    """Evaluation shifts targets by itself, and drops the last token of each sequence."""

    session_class = _ShortSession


class _ShiftedSession(TorchSession):
    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        found = super().evaluate(batch, policy)
        return {**found, "top1": np.roll(found["top1"], 1, axis=1)}


class GuessesShifted(TorchBackend):
    """A guess is held to the target before it."""

    session_class = _ShiftedSession


class _UnmaskedSession(TorchSession):
    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        found = super().evaluate(batch, policy)
        factor = 0.97 if (batch.weights == 1).all() else 1.0
        return {**found, "nll": (found["nll"] * factor).astype(found["nll"].dtype)}


class NllScaledWithoutLossMask(TorchBackend):
    """The branch for batches without a loss mask divides by more tokens than it has."""

    session_class = _UnmaskedSession


class _MaskingSession(TorchSession):
    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        found = super().evaluate(batch, policy)
        first = np.zeros(batch.tokens.shape, bool)
        first[:, 0] = True
        return {**found, "nll": np.ma.masked_array(found["nll"], first)}


class FirstTokensLeftOutOfTheMean(TorchBackend):
    """Every token's NLL is right. The mean leaves out the first token of each sequence."""

    session_class = _MaskingSession
