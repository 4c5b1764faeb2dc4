"""Faulty loaders for a benchmark: their batches are not those of the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.core.backend import Batch
from lockstep.core.bench.loaders import InMemory, TokenByToken


class OneStepLate(InMemory):
    """Return the batch of the next step instead of this one."""

    def make(self, step: int) -> Batch:
        """Return the batch of `step + 1`."""
        return super().make(step + 1)


class OneTokenLate(TokenByToken):
    """Start every sequence one token too late."""

    def _open(self, path: Path, dtype: str) -> NDArray[np.unsignedinteger]:
        return np.roll(super()._open(path, dtype), -1)


class SameTargets(InMemory):
    """Return the tokens as their own targets, not shifted by one."""

    def make(self, step: int) -> Batch:
        """Return the batch of this step with its tokens as targets."""
        made = super().make(step)
        return Batch(made.tokens, made.tokens, made.weights)
