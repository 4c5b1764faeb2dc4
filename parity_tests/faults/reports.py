"""Faults in reported values: the step is right, but its record, and so every plot of it, is wrong."""

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
    """A session that changes the record of each step."""

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        return self.told(super().step(batch, norms=norms))

    def told(self, record: StepRecord) -> StepRecord:
        return record


class _MicroBatchSession(_Reporting):
    def told(self, record: StepRecord) -> StepRecord:
        return replace(record, tokens=record.tokens // self.config.train.accumulation)


class TokensOfOneMicroBatch(TorchBackend):
    """The record counts the tokens of the last micro-batch alone; tokens/s and MFU are then wrong too."""

    session_class = _MicroBatchSession


class _MeanSession(_Reporting):
    def told(self, record: StepRecord) -> StepRecord:
        return replace(record, loss_weight=record.loss_weight / self.config.train.accumulation)


class LossWeightIsAMean(TorchBackend):
    """The record has the mean of the loss weight over micro-batches, not the sum."""

    session_class = _MeanSession


class _ClippedSession(_Reporting):
    def told(self, record: StepRecord) -> StepRecord:
        return replace(record, metrics=scaled(record.metrics, "grad_norm/", record.clip_coefficient))


class NormsByGroupAfterClipping(TorchBackend):
    """Gradient norms by group are those of the clipped gradients."""

    session_class = _ClippedSession


class _SquaredSession(_Reporting):
    def told(self, record: StepRecord) -> StepRecord:
        return replace(record, metrics={**record.metrics, **_squared(record.metrics)})


class WeightNormsAreSquares(TorchBackend):
    """Weight norms by group lack the square root: they are sums of squares."""

    session_class = _SquaredSession


class _HalfSession(_Reporting):
    def told(self, record: StepRecord) -> StepRecord:
        return replace(record, metrics=scaled(record.metrics, UPDATE_RATIO, 0.5))


class UpdateRatioHalved(TorchBackend):
    """The update ratio is half of the right one, as if measured before the update was complete."""

    session_class = _HalfSession


class _UnscaledSession(TorchSession):
    def attention_logits(self, batch: Batch) -> np.ndarray:
        return super().attention_logits(batch) * math.sqrt(self.config.model.head_dim)


class AttentionLogitsUnscaled(TorchBackend):
    """Reported attention logits are q·k, without the factor 1/√E."""

    session_class = _UnscaledSession


class _ExchangedSession(TorchSession):
    def attention_logits(self, batch: Batch) -> np.ndarray:
        return super().attention_logits(batch)[::-1].copy()


class AttentionLogitsOfOtherLayers(TorchBackend):
    """Reported attention logits are in reverse order of layers."""

    session_class = _ExchangedSession


def scaled(metrics: Mapping[str, float], prefix: str, factor: float) -> dict[str, float]:
    """Return the metrics; those whose names begin with `prefix` are multiplied by `factor`."""
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
    """From step 4 on, the learning rate does not decay after the warm-up."""

    session_class = _LeavingSession
