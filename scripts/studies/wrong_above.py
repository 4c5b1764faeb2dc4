"""A trainer that is wrong in one region of a sweep: above a learning rate."""

from __future__ import annotations

from torch import Tensor

from lockstep.core.backend import Batch
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

LIMIT = 3e-3


class _Session(TorchSession):
    def accumulate(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        result = super().accumulate(batch)
        gradient = self.parameters["blocks.0.mlp.down_proj.weight"].grad
        assert gradient is not None
        if self.config.optim.peak_lr > LIMIT:
            gradient.mul_(1.05)
        return result


class WrongAbove(TorchBackend):
    """A trainer with one gradient a twentieth too long where `optim.peak_lr` > LIMIT; Adam hides it from the loss."""

    session_class = _Session
