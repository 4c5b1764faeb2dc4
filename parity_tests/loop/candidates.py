"""Trainers that are not deterministic: gradients that differ between calls, and an operation that torch refuses."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor

from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

_calls = count(1)


class _Drifts(TorchSession):
    """A session whose gradient changes by some ulps from call to call, like a sum by atomic operations."""

    def accumulate(self, batch: Any) -> tuple[Tensor, list[Tensor]]:
        found = super().accumulate(batch)
        grad = self.parameters["blocks.1.mlp.up_proj.weight"].grad
        assert grad is not None
        grad.view(torch.int32)[0, 0] += next(_calls)
        return found


class Drifts(TorchBackend):
    session_class = _Drifts


class _Puts(TorchSession):
    def micro_loss(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        loss, nll = super().micro_loss(*inputs)
        return loss, nll.put(torch.zeros(1, dtype=torch.long), nll.flatten()[:1])


class Puts(TorchBackend):
    session_class = _Puts
