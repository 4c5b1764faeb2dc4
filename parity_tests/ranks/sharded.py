"""Sessions with weights sharded over ranks, and their faults. Every rank opens them by name."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from lockstep.core.backend import Batch, StepRecord
from lockstep.core.config.schema import RunConfig
from lockstep.parity_tests.tiny import tiny_config
from lockstep.torch_backend import optim
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.ranks.fsdp import ShardedRanks
from lockstep.torch_backend.ranks.sharded_tensors import SumAndCut, local
from lockstep.torch_backend.ranks.sharing import Sharing
from lockstep.torch_backend.session import TorchSession

TRAIN = {"batch_size": 8, "micro_batch_size": 2, "sequence_length": 32}


def sharded(
    policy: str = "fp64",
    ranks: int = 2,
    strategy: str = "fsdp",
    sections: Mapping[str, Any] | None = None,
    **model: Any,
) -> RunConfig:
    """Return a tiny run over several ranks. sections: name → the settings to change in it."""
    config = tiny_config(policy, train=TRAIN | {"ranks": ranks}, **model)
    changed = {"parallel": {"strategy": strategy}, **(sections or {})}
    changed["parallel"] = {"strategy": strategy} | dict(changed["parallel"])
    update = {name: getattr(config, name).model_copy(update=dict(values)) for name, values in changed.items()}
    return RunConfig(**config.model_copy(update=update).model_dump())


def with_ranks(ranks: type[ShardedRanks]) -> type[TorchSession]:
    """Return a session class that shards and reduces as `ranks` does."""

    class Session(TorchSession):
        def build_ranks(self) -> Sharing:
            return ranks(self)

    return Session


class _LocalNorm(ShardedRanks):
    def norm(self, norms: Tensor) -> Tensor:
        return norms


class NormOfItsOwnPart(TorchBackend):
    """Every rank clips by the norm of its own shard."""

    session_class = with_ranks(_LocalNorm)


class _SumOfNorms(ShardedRanks):
    def norm(self, norms: Tensor) -> Tensor:
        found = norms.clone()
        dist.all_reduce(found)
        return found


class NormsAdded(TorchBackend):
    """The norms of shards are added, not their squares."""

    session_class = with_ranks(_SumOfNorms)


class _Mean(SumAndCut):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *more: Any, **options: Any) -> Any:
        done = super().__call__(output_tensor, input_tensor, *more, **options)
        output_tensor.div_(dist.get_world_size())
        return done


class _MeanRanks(ShardedRanks):
    def sum_and_cut(self, called: str, members: Sequence[Tensor]) -> SumAndCut:
        return _Mean(lambda gradients: self._noted(called, members, gradients), self.narrow)


class GradientsAveraged(TorchBackend):
    """Gradients are averaged over ranks, FSDP's default, although the loss is already divided by all ranks' tokens."""

    session_class = with_ranks(_MeanRanks)


class _NotReduced(SumAndCut):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *more: Any, **options: Any) -> Any:
        output_tensor.copy_(input_tensor.chunk(dist.get_world_size())[dist.get_rank()])


class _ForgettingRanks(ShardedRanks):
    def sum_and_cut(self, called: str, members: Sequence[Tensor]) -> SumAndCut:
        kind = _NotReduced if called == "blocks.1" else SumAndCut
        return kind(lambda gradients: self._noted(called, members, gradients), self.narrow)


class OneBlockNotReduced(TorchBackend):
    """Each rank keeps its own gradient of its shard of one block, without the sum over ranks."""

    session_class = with_ranks(_ForgettingRanks)


class _EagerRanks(ShardedRanks):
    def run(self, program: Any, *inputs: Any) -> Any:
        return self.root(lambda: program(*inputs))


class NeverFreed(TorchBackend):
    """Weights gathered for an observation are not freed, and the next pass uses them."""

    session_class = with_ranks(_EagerRanks)


class _MuonOnParts(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        with patch.object(optim, "whole", local), patch.object(optim, "rows_of", lambda p: slice(None)):
            return super().step(batch, norms=norms)


class MuonOnParts(TorchBackend):
    """Each rank orthogonalises its own rows, as if they were the whole matrix."""

    session_class = _MuonOnParts


class _SkipsAPart(TorchSession):
    def restore(self, folder: Path, step: int, scalars: Mapping[str, float]) -> None:
        name = "blocks.1.mlp.up_proj.weight"
        kept = local(self.parameters[name]).clone()
        super().restore(folder, step, scalars)
        if dist.is_initialized() and dist.get_rank() == 1:
            local(self.parameters[name]).copy_(kept)


class OnePartNotLoaded(TorchBackend):
    """Rank 1 does not restore its shard of one weight, and keeps the initial values."""

    session_class = _SkipsAPart


class _Measured(TorchSession):
    """A session whose `random_state` returns the bytes of parameters and moments that this rank holds."""

    def random_state(self) -> Any:
        import numpy as np

        held = [local(p) for p in self.parameters.values()]
        for entry in self.optimizer.state.values():
            held += [local(v) for v in entry.values() if isinstance(v, Tensor) and v.ndim]
        return {"held": np.array([sum(t.numel() * t.element_size() for t in held)])}


class SaysWhatItHolds(TorchBackend):
    session_class = _Measured


class _Sleeps(ShardedRanks):
    def gather(self, called: str) -> Any:
        made = super().gather(called)
        if self.rank == 1 and called == "blocks.1":
            right, calls = made._begun, [0]

            def late() -> None:
                calls[0] += 1
                if calls[0] > 2:  # the second step
                    time.sleep(3600)
                right()

            made._begun = late
        return made


class SleepsBeforeAGather(TorchBackend):
    """Rank 1 sleeps for an hour before it gathers one block's weights in the second step."""

    session_class = with_ranks(_Sleeps)


class _NanOnRankOne(TorchSession):
    def total_weight(self, batch: Batch) -> Tensor:
        total = super().total_weight(batch)
        return total * math.nan if self.ranks is not None and self.ranks.rank == 1 else total


class NanOnRankOne(TorchBackend):
    session_class = _NanOnRankOne
