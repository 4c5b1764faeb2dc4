"""Wrong reductions over two ranks that both hold whole weights. Every rank opens them by name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from lockstep.core.backend import Batch
from lockstep.parity_tests.faults.ranks import shared_by
from lockstep.parity_tests.ranks.on_one_rank import on_rank_one
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.ranks.ddp import Ranks
from lockstep.torch_backend.session import TorchSession


class _LastAveraged(Ranks):
    def sum(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.is_last():
            bucket.buffer().div_(dist.get_world_size())
        return super().sum(bucket)


class LastBucketAveraged(TorchBackend):
    """The last bucket is averaged over ranks; the others are summed."""

    session_class = shared_by(_LastAveraged)


class _SentInBf16(Ranks):
    def sum(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if on_rank_one():
            bucket.buffer().copy_(bucket.buffer().bfloat16())
        return super().sum(bucket)


class RankOneSendsBf16(TorchBackend):
    """Rank 1 rounds its gradients to bf16 before the reduction, although FP32 is declared."""

    session_class = shared_by(_SentInBf16)


class _WithoutTail(Ranks):
    def sum(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if on_rank_one() and bucket.is_last():
            bucket.buffer()[-17:] = 0
        return super().sum(bucket)


class TailOfRankOneLost(TorchBackend):
    """The last 17 elements of rank 1's last bucket are lost."""

    session_class = shared_by(_WithoutTail)


class _OneLonger(Ranks):
    def sum(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        if on_rank_one():
            longer = next((g for g in bucket.gradients() if g.shape == (128, 64)), None)
            if longer is not None:
                longer.mul_(1.003)
        return super().sum(bucket)


class RankOneSendsOneLonger(TorchBackend):
    """One gradient of rank 1 is 0.3 % too large."""

    session_class = shared_by(_OneLonger)


class _CountingSession(TorchSession):
    """A session that calls `spoil` on the sums of gradients before every micro-batch except the first."""

    _number = 0

    def accumulate(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        self._number = 0
        return super().accumulate(batch)

    def _forward_backward(self, micro: Batch, program: Any, total: Tensor) -> tuple[Tensor, Tensor]:
        self._number += 1
        if self._number > 1:
            self.spoil([p.grad for p in self.parameters.values() if p.grad is not None])
        return super()._forward_backward(micro, program, total)

    def spoil(self, sums: list[Tensor]) -> None:
        raise NotImplementedError


class _RoundingSession(_CountingSession):
    def spoil(self, sums: list[Tensor]) -> None:
        for one in sums:
            one.copy_(one.bfloat16())


class EveryRankAccumulatesInBf16(TorchBackend):
    """Each rank rounds the sum over its micro-batches to bf16."""

    session_class = _RoundingSession


class _LosingSession(_CountingSession):
    def spoil(self, sums: list[Tensor]) -> None:
        if on_rank_one():
            torch._foreach_zero_(sums)


class RankOneForgets(TorchBackend):
    """Rank 1 clears its gradients before its last micro-batch."""

    session_class = _LosingSession
