"""Faults of what a step starts from and leaves behind."""

from __future__ import annotations

from dataclasses import replace

import torch

from core.backend import Batch, StepRecord
from core.config import RunConfig
from torch_backend.session import TorchBackend, TorchSession


class _InitSession(TorchSession):
    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        with torch.no_grad():
            self.parameters["blocks.0.mlp.up_proj.weight"].mul_(1.001)


class OtherInitialWeights(TorchBackend):
    """One matrix starts a thousandth too large."""

    session_class = _InitSession


class _OtherBatchSession(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        tokens = batch.tokens.copy()
        tokens[0, 0] ^= 1
        return super().step(Batch(tokens, batch.targets, batch.weights), norms=norms)


class OtherBatch(TorchBackend):
    """The step trains on a batch in which one token differs."""

    session_class = _OtherBatchSession


class _CountingSession(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        record = super().step(batch, norms=norms)
        self.steps_done += self.config.train.accumulation - 1
        return replace(record, step=self.steps_done)


class CountsMicroBatches(TorchBackend):
    """The step counter, and with it the schedule, counts micro-batches (transformers #24088)."""

    session_class = _CountingSession
