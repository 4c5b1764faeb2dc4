"""Faults on rank 1 alone, of two or more ranks. Every rank opens them by name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.backend import Batch, StepRecord
from lockstep.core.train.finite import NotFinite
from lockstep.parity_tests.faults.attention import RopeInBf16
from lockstep.parity_tests.faults.later import LastCheckpointInBf16, PeakRateAfterWarmUp
from lockstep.parity_tests.faults.outside import OldGradientsMixedIn, PeakRateOnceWritten, RestoreResetsBetas
from lockstep.parity_tests.ranks.sharded import with_ranks
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.ranks.fsdp import ShardedRanks
from lockstep.torch_backend.ranks.sharded_tensors import SumAndCut, local
from lockstep.torch_backend.session import TorchSession

WEIGHT = "blocks.1.mlp.up_proj.weight"


def on_rank_one() -> bool:
    """Return whether this process is rank 1 of several."""
    return dist.is_initialized() and dist.get_rank() == 1


class _OnRankOne(TorchBackend):
    def open_rank(self, config: Any) -> TorchSession:
        """Open the faulty session on rank 1, and a right one on other ranks."""
        return super().open_rank(config) if on_rank_one() else TorchBackend().open_rank(config)


class RopeInBf16OnRankOne(_OnRankOne, RopeInBf16):
    """Rank 1 computes RoPE in bf16, as with another version of a library on one node."""


class OldGradientsMixedInOnRankOne(_OnRankOne, OldGradientsMixedIn):
    """Rank 1 adds a tenth of the last step's gradients to its own, from a buffer that a load clears."""


class _NotUpdated(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        before = local(self.parameters[WEIGHT]).clone()
        record = super().step(batch, norms=norms)
        if on_rank_one():
            local(self.parameters[WEIGHT]).copy_(before)
        return record


class NotUpdatedOnRankOne(TorchBackend):
    """Rank 1 does not update one weight, or its rows of it."""

    session_class = _NotUpdated


class _Doubled(SumAndCut):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *more: Any, **options: Any) -> Any:
        done = super().__call__(output_tensor, input_tensor, *more, **options)
        if on_rank_one():
            output_tensor.mul_(2)
        return done


class _DoublingRanks(ShardedRanks):
    def sum_and_cut(self, called: str, members: Any) -> SumAndCut:
        kind = _Doubled if called.endswith("blocks.1") else SumAndCut
        return kind(lambda gradients: self._noted(called, members, gradients), self.narrow)


class GradientsDoubledOnRankOne(TorchBackend):
    """Rank 1 doubles the reduced gradients of its rows of one block."""

    session_class = with_ranks(_DoublingRanks)


class _ZeroGradient(TorchSession):
    def join_ranks(self) -> None:
        super().join_ranks()
        if on_rank_one():
            self.parameters[WEIGHT].register_hook(torch.zeros_like)


class NoGradientOnRankOne(TorchBackend):
    """The gradient of one weight is zero on rank 1, as with a frozen layer on one node."""

    session_class = _ZeroGradient


class PeakRateAfterWarmUpOnRankOne(_OnRankOne, PeakRateAfterWarmUp):
    """Rank 1 uses the peak learning rate in steps after the warm-up."""


class _DecaysWhenNotFinite(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        try:
            return super().step(batch, norms=norms)
        except NotFinite:
            if on_rank_one():
                local(self.parameters[WEIGHT]).detach().mul_(1 - 1e-4)
            raise


class DecaysWhenNotFiniteOnRankOne(TorchBackend):
    """Rank 1 applies weight decay to one matrix in a step that is skipped as not finite."""

    session_class = _DecaysWhenNotFinite


class LastCheckpointInBf16OnRankOne(_OnRankOne, LastCheckpointInBf16):
    """Rank 1 rounds its weights to bf16 in the checkpoint of the run's last step."""


class PeakRateOnceWrittenOnRankOne(_OnRankOne, PeakRateOnceWritten):
    """Rank 1 uses the peak learning rate after the start of a checkpoint."""


class RestoreResetsBetasOnRankOne(_OnRankOne, RestoreResetsBetas):
    """Rank 1's optimizer has other betas after a resume, until a load."""


class _DoublingLater(TorchSession):
    def accumulate(self, batch: Batch) -> Any:
        found = super().accumulate(batch)
        if on_rank_one() and self.steps_done >= self.config.optim.warmup_steps:
            gradient = self.parameters[WEIGHT].grad
            assert gradient is not None
            gradient.mul_(2)
        return found


class DoubledAfterWarmUpOnRankOne(TorchBackend):
    """Rank 1 doubles the reduced gradient of one weight in steps after the warm-up."""

    session_class = _DoublingLater
