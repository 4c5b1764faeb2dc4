"""Faults that start in a later step of a run, whose records report the right learning rate and clip coefficient.

The first steps are right. A check therefore also runs the first step as if it were a later one
(core/parity/evidence/later_steps.py), and compares the resulting weights and moments with the reference.
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
    """A session with `is_later`: whether the warm-up is over."""

    @property
    def is_later(self) -> bool:
        return self.steps_done >= self.config.optim.warmup_steps


class _PeakSession(_LaterSession):
    def _update(self, grads: list[Tensor], coefficient: Any, lr: float, finite: Any) -> None:
        super()._update(grads, coefficient, self.config.optim.peak_lr if self.is_later else lr, finite)


class PeakRateAfterWarmUp(TorchBackend):
    """After the warm-up, steps use the peak learning rate; their records report that of the schedule."""

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
    """After the warm-up, the weight decay is zero."""

    session_class = _DecaySession


class _LengtheningSession(TorchSession):
    def _update(self, grads: list[Tensor], coefficient: Any, lr: float, finite: Any) -> None:
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
        short = 0 < norm < self.config.optim.clip_norm
        super()._update(grads, self.config.optim.clip_norm / norm if short else coefficient, lr, finite)


class LengthensShortGradients(TorchBackend):
    """Gradients with a norm below the clip norm are scaled up to it; records report a clip coefficient of 1."""

    session_class = _LengtheningSession


class _ForgettingSession(_LaterSession):
    def _update(self, *given: Any) -> None:
        if self.is_later:
            for entry in self.optimizer.state.values():
                entry["exp_avg"].zero_()
        super()._update(*given)


class MomentumEndsWithWarmUp(TorchBackend):
    """After the warm-up, the first moments are set to zero before each step."""

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
    """The checkpoint of the run's last step has weights rounded to bf16, as an export for publication would."""

    session_class = _NarrowSession


class _UnmaskedSession(_LaterSession):
    def accumulate(self, batch: Batch) -> Any:
        if self.is_later:
            batch = replace(batch, weights=batch.weights * (torch.arange(batch.weights.shape[1]).numpy() > 0))
        return super().accumulate(batch)


class FirstTokenLeftOutAfterWarmUp(TorchBackend):
    """After the warm-up, the loss leaves out the first token of each sequence."""

    session_class = _UnmaskedSession
