"""Faults that begin in a later step of a run, and tell the right rate and clip coefficient there.

The first steps are right. A check makes the first one as later ones too (core/parity/evidence/later_steps.py), and
holds what these do to weights and moments to the reference.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.core.backend import Batch, State
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession


class _LaterSession(TorchSession):
    """Knows when the warm-up is over."""

    @property
    def is_later(self) -> bool:
        return self.steps_done >= self.config.optim.warmup_steps


class _PeakSession(_LaterSession):
    def _update(self, grads: list[Tensor], coefficient: Any, lr: float, finite: Any) -> None:
        super()._update(grads, coefficient, self.config.optim.peak_lr if self.is_later else lr, finite)


class PeakRateAfterWarmUp(TorchBackend):
    """After the warm-up, steps are made at the peak rate; their records say the schedule's."""

    session_class = _PeakSession


class _DecaySession(_LaterSession):
    def _update(self, *given: Any) -> None:
        if self.is_later:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.0
        super()._update(*given)

    def load(self, state: State) -> None:
        kept = [group["weight_decay"] for group in TorchSession(self.config).optimizer.param_groups]
        super().load(state)
        for group, decay in zip(self.optimizer.param_groups, kept, strict=True):
            group["weight_decay"] = decay


class NoDecayAfterWarmUp(TorchBackend):
    """Weight decay ends with the warm-up."""

    session_class = _DecaySession


class _LengtheningSession(TorchSession):
    def _update(self, grads: list[Tensor], coefficient: Any, lr: float, finite: Any) -> None:
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
        short = 0 < norm < self.config.optim.clip_norm
        super()._update(grads, self.config.optim.clip_norm / norm if short else coefficient, lr, finite)


class LengthensShortGradients(TorchBackend):
    """Gradients shorter than the clip norm are brought to its length; their records say a coefficient of 1."""

    session_class = _LengtheningSession


class _ForgettingSession(_LaterSession):
    def _update(self, *given: Any) -> None:
        if self.is_later:
            for entry in self.optimizer.state.values():
                entry["exp_avg"].zero_()
        super()._update(*given)


class MomentumEndsWithWarmUp(TorchBackend):
    """After the warm-up the first moment is emptied before each step."""

    session_class = _ForgettingSession


class _NarrowSession(TorchSession):
    def write(self, folder: Path) -> Any:
        if self.steps_done < self.config.train.steps:
            return super().write(folder)
        kept = {name: p.detach().clone() for name, p in self.parameters.items()}
        with torch.no_grad():
            for p in self.parameters.values():
                p.copy_(p.bfloat16())
        written = super().write(folder)
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(kept[name])
        return written


class LastCheckpointInBf16(TorchBackend):
    """The checkpoint of the run's last step has weights in bf16, as one to publish would."""

    session_class = _NarrowSession


class _UnmaskedSession(_LaterSession):
    def accumulate(self, batch: Batch) -> Any:
        if self.is_later:
            batch = replace(batch, weights=batch.weights * (torch.arange(batch.weights.shape[1]).numpy() > 0))
        return super().accumulate(batch)


class FirstTokenLeftOutAfterWarmUp(TorchBackend):
    """After the warm-up the first token of each sequence has no part in the loss."""

    session_class = _UnmaskedSession
