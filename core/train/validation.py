"""Validation: score held-out micro-batches at a session's weights, and reduce the scores to metrics of a record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from lockstep.core.backend import Arrays, Batch, Session

LOSS, TOP1 = "val/loss", "val/top1"


@dataclass(frozen=True)
class Validation:
    """The validation that is due after a step. batches: held-out micro-batches. timed: entered while it lasts."""

    batches: Sequence[Batch]
    timed: Callable[[], AbstractContextManager[None]] = nullcontext

    def scores(self, session: Session) -> list[Arrays]:
        """Return `session.evaluate` of each micro-batch."""
        with self.timed():
            return [session.evaluate(batch) for batch in self.batches]


def means(scores: Sequence[Arrays]) -> dict[str, float]:
    """Return the mean NLL in nats and the share of tokens guessed right, over micro-batches of one size."""
    return {
        LOSS: float(np.mean([one["nll"].mean(dtype=np.float64) for one in scores])),
        TOP1: float(np.mean([one["top1"].mean(dtype=np.float64) for one in scores])),
    }
