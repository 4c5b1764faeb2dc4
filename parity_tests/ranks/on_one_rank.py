"""Faults of rank 1 alone, of two or more. Each rank opens them by name."""

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
        """Open the fault's session on rank 1, and an honest one elsewhere."""
        return super().open_rank(config) if on_rank_one() else TorchBackend().open_rank(config)


class RopeInBf16OnRankOne(_OnRankOne, RopeInBf16):
    """Rank 1 rotates in bf16, as with another version of a library on one node."""


class OldGradientsMixedInOnRankOne(_OnRankOne, OldGradientsMixedIn):
    """Rank 1 adds a tenth of the last step's gradients to its own, from a buffer that a load empties."""


class _NotUpdated(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        before = local(self.parameters[WEIGHT]).clone()
        record = super().step(batch, norms=norms)
        if on_rank_one():
            local(self.parameters[WEIGHT]).copy_(before)
        return record


class NotUpdatedOnRankOne(TorchBackend):
    """Rank 1 leaves one weight, or its rows of it, as they were."""

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
    """Rank 1 takes twice the sum of its rows of a block's gradients."""

    session_class = with_ranks(_DoublingRanks)


class _ZeroGradient(TorchSession):
    def join_ranks(self) -> None:
        super().join_ranks()
        if on_rank_one():
            self.parameters[WEIGHT].register_hook(torch.zeros_like)


class NoGradientOnRankOne(TorchBackend):
    """Rank 1 gives one weight no gradient: a frozen layer on one node."""

    session_class = _ZeroGradient


class PeakRateAfterWarmUpOnRankOne(_OnRankOne, PeakRateAfterWarmUp):
    """Rank 1 makes the steps after the warm-up at the peak rate."""


class _DecaysWhenNotFinite(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        try:
            return super().step(batch, norms=norms)
        except NotFinite:
            if on_rank_one():
                local(self.parameters[WEIGHT]).detach().mul_(1 - 1e-4)
            raise


class DecaysWhenNotFiniteOnRankOne(TorchBackend):
    """Rank 1 leaves a step out that is not finite, but for a matrix that decays."""

    session_class = _DecaysWhenNotFinite


class LastCheckpointInBf16OnRankOne(_OnRankOne, LastCheckpointInBf16):
    """Rank 1 writes its weights of the run's last checkpoint in bf16."""


class PeakRateOnceWrittenOnRankOne(_OnRankOne, PeakRateOnceWritten):
    """Rank 1 makes steps at the peak rate once a checkpoint was begun."""


class RestoreResetsBetasOnRankOne(_OnRankOne, RestoreResetsBetas):
    """Rank 1 puts other betas in force as it resumes, until a load."""


class _DoublingLater(TorchSession):
    def accumulate(self, batch: Batch) -> Any:
        found = super().accumulate(batch)
        if on_rank_one() and self.steps_done >= self.config.optim.warmup_steps:
            gradient = self.parameters[WEIGHT].grad
            assert gradient is not None
            gradient.mul_(2)
        return found


class DoubledAfterWarmUpOnRankOne(TorchBackend):
    """Rank 1 takes twice the sum over ranks of one weight's gradient in steps after the warm-up."""

    session_class = _DoublingLater
