"""Faults in the copy to the device: the batch's digest is right, the step's program gets other arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lockstep.core.backend import Batch
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession
from lockstep.torch_backend.upload import Uploaded


class _ShiftingSession(TorchSession):
    """A session in which one array of each micro-batch is rolled by one row on the device."""

    shifted: str

    def _forward_backward(self, micro: Batch, program: Any, total: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(micro, Uploaded)
        there = {**micro.on_device, self.shifted: micro.on_device[self.shifted].roll(1, 0)}
        return super()._forward_backward(replace(micro, on_device=there), program, total)


class _TokensSession(_ShiftingSession):
    shifted = "tokens"


class TokensShiftedOnTheWay(TorchBackend):
    """Tokens of a row are another row's: a slot of the prefetch buffer was read before it was filled."""

    session_class = _TokensSession


class _TargetsSession(_ShiftingSession):
    shifted = "targets"


class TargetsShiftedOnTheWay(TorchBackend):
    """Targets of a row are another row's."""

    session_class = _TargetsSession


class _WeightsSession(_ShiftingSession):
    shifted = "weights"


class WeightsShiftedOnTheWay(TorchBackend):
    """Loss weights of a row are another row's."""

    session_class = _WeightsSession


class _DocumentsSession(_ShiftingSession):
    shifted = "documents"


class DocumentsShiftedOnTheWay(TorchBackend):
    """Document ids of a row are another row's."""

    session_class = _DocumentsSession
