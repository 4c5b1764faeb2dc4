"""Inputs of the contenders of `lockstep bench peers`, and their turns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.core.backend import Batch
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.graph import GROUPS
from lockstep.core.model.groups import group_settings
from lockstep.core.model.init import init_parameters
from lockstep.core.model.names import groups_of
from lockstep.core.train.schedule import learning_rate

# A contender calls it before each step with the loss of the step before, or None. It returns at the contender's turn.
Turn = Callable[[float | None], None]


class Over(Exception):
    """The signal that there is no further turn."""


@dataclass(frozen=True)
class Race:
    """The inputs of a race.

    batches: used in order, repeatedly. made: batches that replace them; each is made after the step before it.
    """

    config: RunConfig
    batches: Sequence[Batch] = ()
    made: Iterable[Batch] | None = None

    def stream(self) -> Iterator[Batch]:
        """Yield batches; those of `batches` repeat endlessly."""
        return itertools.cycle(self.batches) if self.made is None else iter(self.made)

    def weights(self) -> dict[str, Tensor]:
        """Compute the initial weights by canonical name, float32. They are not stored, so unused ones use no memory."""
        return {name: torch.from_numpy(p) for name, p in init_parameters(self.config.model, self.config.seed).items()}

    @property
    def device(self) -> torch.device:
        """The device of the race."""
        return torch.device("cuda" if self.config.device == "cuda" else "cpu")

    def micro_batches(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Return, for each batch, (tokens, targets) of each micro-batch, int64 (B, S), copied to the device."""
        size = self.config.train.micro_batch_size
        return [
            [
                (torch.from_numpy(m.tokens).long().to(self.device), torch.from_numpy(m.targets).long().to(self.device))
                for m in batch.micro_batches(size)
            ]
            for batch in self.batches
        ]

    def fused_adamw(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
        """Return torch's fused AdamW with the run's parameter groups. parameters: by canonical name."""
        optim, group_of = self.config.optim, groups_of(self.config.model)
        groups = [
            {
                "params": [p for name, p in parameters.items() if group_of[name] == group],
                "weight_decay": group_settings(self.config, group).weight_decay,
                "lr_factor": group_settings(self.config, group).lr_factor,
            }
            for group in GROUPS
        ]
        betas = optim.beta1, optim.beta2
        return torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=optim.peak_lr, betas=betas, eps=optim.eps, fused=True
        )

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        return learning_rate(self.config.optim, step, self.config.train.steps)
