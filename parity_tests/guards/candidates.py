"""Trainers with a fault in step AT_STEP. Commands, and every rank, open them by name."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import Tensor

from lockstep.core.backend import Batch, StepRecord
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

AT_STEP = 3


class _Session(TorchSession):
    """A session with `here`: whether this is the step and the rank of the fault (rank 0 if there is only one)."""

    of_rank = 1

    @property
    def here(self) -> bool:
        rank = self.ranks.rank if self.ranks is not None else self.of_rank
        return rank == self.of_rank and self.steps_done + 1 == AT_STEP


class _NanLoss(_Session):
    def micro_loss(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        loss, nll = super().micro_loss(*inputs)
        return (loss * float("nan"), nll) if self.here else (loss, nll)


class NanLoss(TorchBackend):
    """The loss is NaN, and so is every gradient."""

    session_class = _NanLoss


GRADIENT_OF = "blocks.1.mlp.down_proj.weight"


class _InfGradient(_Session):
    def micro_loss(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        if self.here:
            handle = self.parameters[GRADIENT_OF].register_hook(lambda grad: grad / 0)
            handles.append(handle)
        return super().micro_loss(*inputs)

    def accumulate(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        try:
            return super().accumulate(batch)
        finally:
            while handles:
                handles.pop().remove()


handles: list[torch.utils.hooks.RemovableHandle] = []


class InfGradient(TorchBackend):
    """One parameter's gradient is infinite; the loss is right."""

    session_class = _InfGradient


class _Overflows(TorchSession):
    def total_weight(self, batch: Batch) -> Tensor:
        return super().total_weight(batch) * (1e-7 if self.steps_done + 1 == AT_STEP else 1.0)


class Overflows(TorchBackend):
    """Gradients are too large for FP16, but not for FP32."""

    session_class = _Overflows


class _Sleeps(_Session):
    def total_weight(self, batch: Batch) -> Tensor:
        if self.here:
            time.sleep(600)
        return super().total_weight(batch)


class SleepsInAStep(TorchBackend):
    session_class = _Sleeps


class _Stopped(_Session):
    def total_weight(self, batch: Batch) -> Tensor:
        if self.here:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().total_weight(batch)


class IsStopped(TorchBackend):
    """The second rank stops itself by SIGSTOP."""

    session_class = _Stopped


class _SleepsAfter(_Session):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        here, record = self.here, super().step(batch, norms=norms)
        if here:
            time.sleep(600)
        return record


class SleepsAfterAStep(TorchBackend):
    session_class = _SleepsAfter
