"""Validation: score validation micro-batches with a session's weights, and reduce the scores to metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.core.backend import Arrays, Batch, Session

LOSS, TOP1 = "val/loss", "val/top1"
# Prefix of the loss of a mixture's data set.
LOSS_OF = "val/loss/"


@dataclass(frozen=True)
class Sources:
    """The data sets of the validation sequences of a mixture.

    names: (k,), sorted. of: int64 (micro-batches, rows), the index in `names` of each sequence's data set.
    """

    names: tuple[str, ...]
    of: NDArray[np.int64]


@dataclass(frozen=True)
class Validation:
    """The validation that is due after a step.

    batches: validation micro-batches. timed: returns a context that measures its time. sources: for a mixture, the data
    sets of the sequences.
    """

    batches: Sequence[Batch]
    timed: Callable[[], AbstractContextManager[None]] = nullcontext
    sources: Sources | None = None

    def scores(self, session: Session) -> list[Arrays]:
        """Return `session.evaluate` of each micro-batch."""
        with self.timed():
            return [session.evaluate(batch) for batch in self.batches]


def means(scores: Sequence[Arrays], sources: Sources | None = None) -> dict[str, float]:
    """Return the mean NLL in nats and the top-1 accuracy, over micro-batches of one size.

    sources: for a mixture; the result then also has the mean NLL of each data set, as val/loss/NAME.
    """
    return {
        **(dict(_of_each(scores, sources)) if sources else {}),
        LOSS: float(np.mean([one["nll"].mean(dtype=np.float64) for one in scores])),
        TOP1: float(np.mean([one["top1"].mean(dtype=np.float64) for one in scores])),
    }


def _of_each(scores: Sequence[Arrays], sources: Sources) -> Iterator[tuple[str, float]]:
    for number, name in enumerate(sources.names):
        rows = [one["nll"][of == number] for one, of in zip(scores, sources.of, strict=True)]
        yield LOSS_OF + name, float(np.concatenate(rows).mean(dtype=np.float64))
