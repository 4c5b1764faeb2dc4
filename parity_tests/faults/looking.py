"""Faults of operations that should only read a session (evaluation, sampling, checkpoints): they change its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.core.backend import Arrays, Batch, StepRecord
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession


class _AveragingSession(TorchSession):
    average: dict[str, Tensor]

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        record = super().step(batch, norms=norms)
        self._average()
        return record

    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        with torch.no_grad():
            for name, value in self._average(0.0).items():
                self.parameters[name].copy_(value)
        return super().evaluate(batch, policy)

    @torch.no_grad()
    def _average(self, share: float = 0.1) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = self.__dict__.setdefault("average", {})
        for name, p in self.parameters.items():
            kept.setdefault(name, p.detach().clone()).lerp_(p, share)
        return kept


class AveragedWeightsStay(TorchBackend):
    """Evaluation replaces the weights by their moving average, and does not restore them."""

    session_class = _AveragingSession


class _RoundingSession(TorchSession):
    def evaluate(self, batch: Batch, policy: str | None = None) -> Arrays:
        with torch.no_grad():
            for p in self.parameters.values():
                p.copy_(p.bfloat16())
        return super().evaluate(batch, policy)


class EvaluationRoundsWeights(TorchBackend):
    """The model is cast to bf16 for evaluation, and cast back."""

    session_class = _RoundingSession


class _ForgettingSession(TorchSession):
    def next_token_logits(self, tokens: np.ndarray) -> np.ndarray:
        self._forget()
        return super().next_token_logits(tokens)

    def cached_logits(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        self._forget()
        return super().cached_logits(tokens, lengths)

    def _forget(self) -> None:
        for entry in self.optimizer.state.values():
            if "exp_avg_sq" in entry:
                entry["exp_avg_sq"].zero_()


class SamplingFreesMoments(TorchBackend):
    """Sampling sets the optimizer's second moments to zero, as if it needed their memory for the KV cache."""

    session_class = _ForgettingSession


class _WritingSession(TorchSession):
    def write(self, folder: Path) -> Any:
        with torch.no_grad():
            self.parameters["embed.weight"].copy_(self.parameters["embed.weight"].half())
        return super().write(folder)


class CheckpointRoundsWeights(TorchBackend):
    """Writing a checkpoint casts the embedding's weight to FP16 in place, which rounds the trained weight."""

    session_class = _WritingSession
