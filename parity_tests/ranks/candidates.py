"""Trainers that fail on one rank, and two that record graphs and gradients. Every rank opens them by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.core.backend import Batch, StepRecord
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.checkpoint import WritingTorch
from lockstep.torch_backend.session import TorchSession


class _RaisingSession(TorchSession):
    def total_weight(self, batch: Batch) -> torch.Tensor:
        if self.ranks is not None and self.ranks.rank == 1:
            raise ArithmeticError("out of luck")
        return super().total_weight(batch)


class RaisesOnRankOne(TorchBackend):
    session_class = _RaisingSession


class _RaisingLeader(TorchSession):
    def total_weight(self, batch: Batch) -> torch.Tensor:
        if self.ranks is not None and self.ranks.rank == 0:
            raise RuntimeError("rank 0 is out of luck")
        return super().total_weight(batch)


class RaisesOnRankZero(TorchBackend):
    session_class = _RaisingLeader


class _DyingSession(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        if self.ranks is not None and self.ranks.rank == 1:
            os._exit(3)
        return super().step(batch, norms=norms)


class DiesOnRankOne(TorchBackend):
    session_class = _DyingSession


class _DyingWriter(TorchSession):
    def write(self, folder: Path) -> WritingTorch:
        if self.ranks is not None and self.ranks.rank == 1:
            os._exit(3)
        return super().write(folder)


class DiesOnRankOneAtACheckpoint(TorchBackend):
    session_class = _DyingWriter


class _UnopenedSession(TorchSession):
    def join_ranks(self) -> None:
        if torch.distributed.get_rank() == 1:
            raise MemoryError("no room")
        super().join_ranks()


class DoesNotOpenOnRankOne(TorchBackend):
    session_class = _UnopenedSession


class _RefusingSession(TorchSession):
    def load(self, state: Any) -> None:
        if self.ranks is not None and self.ranks.rank == 1:
            raise ValueError("not mine")
        super().load(state)


class RefusesStatesOnRankOne(TorchBackend):
    session_class = _RefusingSession


class _CountingSession(TorchSession):
    """A session that records the size of each graph that the compiler gets: DDP cuts the program by its buckets."""

    def compiled(self, program: Any) -> Any:
        self.graphs: list[int] = []

        def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            self.graphs.append(len(graph.graph.nodes))
            return graph.forward

        return torch.compile(program, fullgraph=True, dynamic=False, backend=keep)


class _PlacesOfGradients(TorchSession):
    """A session that records the storages of the gradients after each micro-batch of a step."""

    def accumulate(self, batch: Batch) -> Any:
        self.places: list[set[int]] = []
        return super().accumulate(batch)

    def _forward_backward(self, micro: Batch, program: Any, total: Tensor) -> Any:
        found = super()._forward_backward(micro, program, total)
        there = [p.grad for p in self.parameters.values() if p.grad is not None]
        self.places.append({grad.untyped_storage().data_ptr() for grad in there})
        return found


class ShowsPlacesOfGradients(TorchBackend):
    session_class = _PlacesOfGradients


class CountsGraphs(TorchBackend):
    session_class = _CountingSession
