"""Trainers that restore a stored state wrongly, in ways that comparing the state itself does not show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lockstep.core.backend import NotSupported, State
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.ranks.sharded_tensors import local
from lockstep.torch_backend.session import TorchSession

WEIGHT = "blocks.1.mlp.up_proj.weight"


class _MiscountingSession(TorchSession):
    def load(self, state: State) -> None:
        super().load(state)
        for entry in self.optimizer.state.values():
            entry["step"] = entry["step"] + 1


class CountsAnUpdateTooMany(TorchBackend):
    """After a resume, the optimizer's count of updates is one too large; the step number is right."""

    session_class = _MiscountingSession


class _ScaleForgettingSession(TorchSession):
    def load(self, state: State) -> None:
        super().load(replace(state, scalars={}))


class LossScaleLostOnLoad(TorchBackend):
    """After a resume, the loss scale is that of a new run."""

    session_class = _ScaleForgettingSession


class _MixingSession(TorchSession):
    def restore(self, folder: Path, step: int, scalars: Mapping[str, float]) -> None:
        super().restore(folder, step, scalars)
        if self.ranks is None or self.ranks.rank == 1:
            moment = local(self.optimizer.state[self.parameters[WEIGHT]]["exp_avg"])
            moment.copy_(torch.roll(moment, 1, 0))


class RowsMixed(TorchBackend):
    """After a resume, the rows of one moment are rolled by one; with several ranks, only on rank 1."""

    session_class = _MixingSession


class _ForgettingSession(TorchSession):
    def restore(self, folder: Path, step: int, scalars: Mapping[str, float]) -> None:
        super().restore(folder, step, scalars)
        for group in self.optimizer.param_groups:
            group["betas"] = (0.9, 0.999)


class SettingsForgottenOnRestore(TorchBackend):
    """After a resume, weights and moments are right, but the optimizer has torch's default betas."""

    session_class = _ForgettingSession


class _HidingSession(TorchSession):
    def state(self) -> State:
        raise NotSupported("mine shows no state")

    def write(self, folder: Path) -> Any:
        return self._writer.begin(folder)


class ShowsNoState(TorchBackend):
    """No fault; the session writes and restores its state, but `state` raises NotSupported."""

    session_class = _HidingSession
