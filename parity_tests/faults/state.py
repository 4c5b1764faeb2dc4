"""Faults in the state before or after a step: weights, batch, counters, checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from lockstep.core.backend import Batch, State, StepRecord
from lockstep.core.config.schema import RunConfig
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.checkpoint import Writer, WritingTorch, named_tensors
from lockstep.torch_backend.session import TorchSession


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
        return super().step(replace(batch, tokens=tokens), norms=norms)


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


class _MomentsLostSession(TorchSession):
    def load(self, state: State) -> None:
        super().load(state)
        for p in self.parameters.values():
            self.optimizer.state[p]["exp_avg"].zero_()
            self.optimizer.state[p]["exp_avg_sq"].zero_()


class MomentsLostOnLoad(TorchBackend):
    """Resuming begins with empty moments (KempnerForge #114)."""

    session_class = _MomentsLostSession


class _RoundingLoadSession(TorchSession):
    def load(self, state: State) -> None:
        super().load(state)
        with torch.no_grad():
            for p in self.parameters.values():
                p.copy_(p.bfloat16())


class WeightsRoundedOnLoad(TorchBackend):
    """A checkpoint comes back with its master weights in bf16."""

    session_class = _RoundingLoadSession


class _ForgetfulSession(TorchSession):
    def load(self, state: State) -> None:
        super().load(replace(state, step=0))


class StepLostOnLoad(TorchBackend):
    """Resuming counts steps from zero: bias corrections and warm-up begin again."""

    session_class = _ForgetfulSession


class _ExchangingSession(TorchSession):
    def load(self, state: State) -> None:
        super().load(state)
        first, second = (self.parameters[f"blocks.{number}.attn.q_proj.weight"] for number in (0, 1))
        with torch.no_grad():
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)


class BlocksExchangedOnLoad(TorchBackend):
    """Names of a checkpoint are sorted as words, so that two blocks take each other's weights."""

    session_class = _ExchangingSession


class _SharingWriter(Writer):
    def begin(self, folder: Path) -> WritingTorch:
        made = super().begin(folder)
        # Keep references to the tensors, as if tensors on the CPU needed no copy.
        made._tensors = {name: tensor() for name, tensor in named_tensors(self._session).items()}
        return made


class _SharingSession(TorchSession):
    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._writer = _SharingWriter(self)


class CheckpointOfALaterStep(TorchBackend):
    """A checkpoint is written of the weights themselves, not of a copy, while training changes them."""

    session_class = _SharingSession


class _NarrowWriter(Writer):
    def begin(self, folder: Path) -> WritingTorch:
        made = super().begin(folder)
        made._tensors = {
            name: tensor.bfloat16().float() if name.startswith("exp_avg/") else tensor
            for name, tensor in made._tensors.items()
        }
        return made


class _NarrowSession(TorchSession):
    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._writer = _NarrowWriter(self)


class FirstMomentsWrittenInBf16(TorchBackend):
    """First moments are rounded to bf16 on their way to the disk."""

    session_class = _NarrowSession
