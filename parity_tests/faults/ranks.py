"""Faults between ranks: wrong shares of the batch, wrong reductions, ranks that drift apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lockstep.core.backend import Batch, StepRecord
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.ranks.ddp import Ranks
from lockstep.torch_backend.ranks.sharing import MicroLoss
from lockstep.torch_backend.session import TorchSession


def shared_by(ranks: type[Ranks]) -> type[TorchSession]:
    """Return a session class that uses `ranks` to share batches and reduce gradients."""

    class Session(TorchSession):
        def build_ranks(self) -> Ranks:
            return ranks(self)

    return Session


class _OwnCountSession(TorchSession):
    def total_weight(self, batch: Batch) -> Tensor:
        micros = batch.micro_batches(min(self.config.train.micro_batch_size, len(batch.tokens)))
        if self.ranks is None or not self.ranks.shares(micros):
            return super().total_weight(batch)
        own = sum(float(micro.weights.sum(dtype="float64")) for micro in self.ranks.share(micros))
        return torch.tensor(own * self.ranks.count, dtype=torch.float64, device=self.device)


class EveryRankDividesByItsOwn(TorchBackend):
    """Every rank divides by its own token count, and the mean is taken over ranks (transformers #34242)."""

    session_class = _OwnCountSession


class _RepeatedRanks(Ranks):
    def share(self, micros: Sequence[Batch]) -> Sequence[Batch]:
        return micros[: len(micros) // self.count]


class EveryRankReadsTheFirstShare(TorchBackend):
    """All ranks compute the first rank's sequences, as with a sampler that does not know its rank."""

    session_class = shared_by(_RepeatedRanks)


class _Bf16Ranks(Ranks):
    def __init__(self, session: TorchSession) -> None:
        super().__init__(session)
        self._narrow = torch.bfloat16


class ReducedInBf16(TorchBackend):
    """Gradients are summed over ranks in bf16 where FP32 is declared (pytorch #106395)."""

    session_class = shared_by(_Bf16Ranks)


class _ForgettingRanks(Ranks):
    def left_out(self, program: nn.Module) -> list[str]:
        forgotten = [n for n, _ in program.named_parameters() if n.endswith("blocks.1.mlp.up_proj.weight")]
        return [*super().left_out(program), *forgotten]


class OneParameterNotReduced(TorchBackend):
    """One parameter's gradient stays on its rank (Megatron #1446)."""

    session_class = shared_by(_ForgettingRanks)


class _BypassedRanks(Ranks):
    def plan(self, micros: Sequence[Batch]) -> Iterator[MicroLoss]:
        return (self.alone for _ in super().plan(micros))


class DdpBypassed(TorchBackend):
    """The module inside DDP is called instead of DDP: nothing is reduced, and ranks drift apart (pytorch #104336)."""

    session_class = shared_by(_BypassedRanks)


class _StepsOnceARankSession(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        done, ranks = self.steps_done, self.config.train.ranks
        # `step` then increments this to (done + 1) · ranks: the count of a schedule that every rank has stepped.
        self.steps_done = (done + 1) * ranks - 1
        try:
            record = super().step(batch, norms=norms)
        finally:
            self.steps_done = done + 1
        return StepRecord(**vars(record) | {"step": done + 1})


class SchedulerStepsOnceARank(TorchBackend):
    """The scheduler takes a step for every rank: the learning rate is that of a later step (transformers #24088)."""

    session_class = _StepsOnceARankSession
