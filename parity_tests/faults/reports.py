"""Faults of what a step's record only reports: the step itself is right, and what is drawn of it is not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from lockstep.core.backend import Batch, StepRecord
from lockstep.core.train.metrics import UPDATE_RATIO
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession


class _Reporting(TorchSession):
    """Reports a step otherwise than it was."""

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        return self.told(super().step(batch, norms=norms))

    def told(self, record: StepRecord) -> StepRecord:
        return record


class _MicroBatchSession(_Reporting):
    def told(self, record: StepRecord) -> StepRecord:
        return replace(record, tokens=record.tokens // self.config.train.accumulation)


class TokensOfOneMicroBatch(TorchBackend):
    """Tokens are counted in the last micro-batch alone, and with them tokens a second and MFU."""

    session_class = _MicroBatchSession


class _MeanSession(_Reporting):
    def told(self, record: StepRecord) -> StepRecord:
        return replace(record, loss_weight=record.loss_weight / self.config.train.accumulation)


class LossWeightIsAMean(TorchBackend):
    """The loss weight is averaged over micro-batches where it is to be summed."""

    session_class = _MeanSession


class _ClippedSession(_Reporting):
    def told(self, record: StepRecord) -> StepRecord:
        return replace(record, metrics=scaled(record.metrics, "grad_norm/", record.clip_coefficient))


class NormsByGroupAfterClipping(TorchBackend):
    """Gradient norms by group are taken of the gradients when they are clipped already."""

    session_class = _ClippedSession


class _SquaredSession(_Reporting):
    def told(self, record: StepRecord) -> StepRecord:
        return replace(record, metrics={**record.metrics, **_squared(record.metrics)})


class WeightNormsAreSquares(TorchBackend):
    """The root is forgotten of the sum of squares over a group's weights."""

    session_class = _SquaredSession


class _HalfSession(_Reporting):
    def told(self, record: StepRecord) -> StepRecord:
        return replace(record, metrics=scaled(record.metrics, UPDATE_RATIO, 0.5))


class UpdateRatioHalved(TorchBackend):
    """The update is measured before the second half of it is made: weight decay is taken for the rest."""

    session_class = _HalfSession


class _UnscaledSession(TorchSession):
    def attention_logits(self, batch: Batch) -> np.ndarray:
        return super().attention_logits(batch) * math.sqrt(self.config.model.head_dim)


class AttentionLogitsUnscaled(TorchBackend):
    """The attention logits that are shown are q·k, without the factor 1/√E of attention."""

    session_class = _UnscaledSession


class _ExchangedSession(TorchSession):
    def attention_logits(self, batch: Batch) -> np.ndarray:
        return super().attention_logits(batch)[::-1].copy()


class AttentionLogitsOfOtherLayers(TorchBackend):
    """The attention logits that are shown are in the order of the backward pass: the last layer's come first."""

    session_class = _ExchangedSession


def scaled(metrics: Mapping[str, float], prefix: str, factor: float) -> dict[str, float]:
    """Return metrics, those whose names begin with `prefix` times `factor`."""
    return {name: value * factor if name.startswith(prefix) else value for name, value in metrics.items()}


def _squared(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value * value for name, value in metrics.items() if name.startswith("param_norm/")}


class _LeavingSession(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        config = self.config
        if self.steps_done + 1 >= 4:
            optim = config.optim.model_copy(update={"min_lr_ratio": 1.0})
            self.config = config.model_copy(update={"optim": optim})
        try:
            return super().step(batch, norms=norms)
        finally:
            self.config = config


class LeavesTheSchedule(TorchBackend):
    """From step 4 on the learning rate falls no more."""

    session_class = _LeavingSession
