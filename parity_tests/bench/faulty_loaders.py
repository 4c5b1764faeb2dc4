"""Loaders of a rung that do not make the run's batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.core.backend import Batch
from lockstep.core.bench.loaders import InMemory, TokenByToken


class OneStepLate(InMemory):
    """Make the batches of the next step."""

    def make(self, step: int) -> Batch:
        """Make the batch of step + 1."""
        return super().make(step + 1)


class OneTokenLate(TokenByToken):
    """Begin every sequence a token late."""

    def _open(self, path: Path, dtype: str) -> NDArray[np.unsignedinteger]:
        return np.roll(super()._open(path, dtype), -1)


class SameTargets(InMemory):
    """Make targets that are the tokens themselves."""

    def make(self, step: int) -> Batch:
        """Make the right tokens."""
        made = super().make(step)
        return Batch(made.tokens, made.tokens, made.weights)
