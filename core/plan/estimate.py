"""The estimate of a configuration on a kind of device: whether it fits, seconds of a step, cost of the run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from lockstep.core.config.curriculum import last_steps, pieces
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.budget import flops_per_token
from lockstep.core.plan.gpus import Gpu, gpu_named
from lockstep.core.plan.memory import Memory, memory
from lockstep.core.plan.seconds import Seconds, seconds


@dataclass(frozen=True)
class Estimate:
    """An estimate of memory and time.

    memory: of each device. seconds: of a step; None where the device's rates are not known.
    """

    config: RunConfig
    gpu: Gpu
    memory: Memory
    seconds: Seconds | None

    @property
    def peak(self) -> float:
        """Bytes that a device needs: the peak of what is allocated, CUDA's context and the allocator's reserve."""
        return self.memory.total

    @property
    def fits(self) -> bool:
        """Return whether that is there; a device whose memory is not known has enough."""
        return not self.gpu.memory or self.peak <= self.gpu.memory

    @property
    def step_seconds(self) -> float | None:
        """Time of a step."""
        return None if self.seconds is None else self.seconds.step

    @property
    def tokens_per_second(self) -> float | None:
        """The tokens a second of all devices together."""
        train = self.config.train
        return None if self.seconds is None else train.batch_size * train.sequence_length / self.seconds.step

    @property
    def mfu(self) -> dict[str, float]:
        """Model FLOP utilisation in the conventions of core/model/budget.py, against the operand's dense peak."""
        if self.tokens_per_second is None:
            return {}
        flops = flops_per_token(self.config.model, self.config.train.sequence_length)
        peak = self.peak_flops * self.config.train.ranks
        return {kind: value * self.tokens_per_second / peak for kind, value in flops.items()}

    @property
    def peak_flops(self) -> float:
        """The dense peak that the run is held against: FP8's if any layer is in FP8."""
        return self.gpu.peaks["fp8" if self.config.precision.fp8 and "fp8" in self.gpu.peaks else self._operand]

    @property
    def _operand(self) -> str:
        return self.config.precision.operand

    @cached_property
    def pieces(self) -> tuple[tuple[int, Estimate], ...]:
        """The steps at each sequence length of the run's curriculum, and their estimate; one piece without any."""
        train = self.config.train
        ends = last_steps(train.curriculum, train.steps)
        if not ends:
            return ((train.steps, self),)
        counts = (last - first for first, last in pairwise((0, *ends)))
        found = []
        for piece, count in zip(pieces(train.curriculum), counts, strict=True):
            own = piece.length == train.sequence_length
            found.append((count, self if own else fits(at_length(self.config, piece.length), self.gpu)))
        return tuple(found)

    @property
    def days(self) -> float | None:
        """Return the days of all steps, each at its sequence length."""
        if self.seconds is None:
            return None
        return sum(count * (estimate.step_seconds or 0.0) for count, estimate in self.pieces) / 86400

    def cost(self, price: float) -> float | None:
        """Return the dollars of all steps, at so many a GPU hour."""
        return None if self.days is None else self.days * 24 * price * self.config.train.ranks


def at_length(config: RunConfig, length: int) -> RunConfig:
    """Return the configuration of steps at one length of its curriculum: as many tokens, in other sequences."""
    train = config.train
    sizes = {
        "sequence_length": length,
        "curriculum": "",
        "batch_size": train.batch_size * train.sequence_length // length,
        "micro_batch_size": train.micro_batch_of(length),
    }
    return config.model_copy(update={"train": train.model_copy(update=sizes)})


def fits(config: RunConfig, gpu: Gpu | str = "h100", *, sharded: bool | None = None) -> Estimate:
    """Estimate the memory and the time of `config` on a device. Framework-free, a few milliseconds at most.

    sharded: see core/plan/memory.py; None: as configured. Raises UserError for the name of a device that is not known,
    and for FP8 on one without.
    """
    device = gpu_named(gpu) if isinstance(gpu, str) else gpu
    if config.precision.fp8 and device.cuda and "fp8" not in device.peaks:
        raise UserError(f"precision.policy = {config.precision.policy!r}: {device.title} has no FP8; use bf16")
    return Estimate(config, device, memory(config, device, sharded=sharded), seconds(config, device))
