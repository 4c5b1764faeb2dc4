"""Gather the validation that is due after a step: all of its scores, and those that the reference repeats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.core.backend import Arrays, Batch, Session
from lockstep.core.train.validation import Validation, means


@dataclass(frozen=True)
class HeldOut:
    """Scores at the weights after a step. The step's record has their means.

    batch: one of the held-out micro-batches. The reference repeats its sequences with weight.
    scores: `nll` and `top1` (B, S) of this micro-batch.
    every: `nll` and `top1` of all micro-batches, concatenated, (N,). For a mixture also `source` int32 (N,): the index
    of each token's data set among the sorted names.
    """

    batch: Batch
    scores: Arrays
    every: Arrays


def held_out(session: Session, validation: Validation, chosen: int, probe: Batch) -> tuple[HeldOut, dict[str, float]]:
    """Score the held-out micro-batches. Returns the evidence and the metrics of the record.

    chosen: index of the micro-batch that is judged token by token.
    probe: this micro-batch, with weight on some sequences.
    """
    scores = validation.scores(session)
    every = {name: np.concatenate([np.ravel(one[name]) for one in scores]) for name in ("nll", "top1")}
    of_one = {name: np.asarray(scores[chosen][name]) for name in every}
    stored = _storable(every)
    if (sources := validation.sources) is not None:
        tokens = [np.repeat(of, one["nll"].shape[1]) for of, one in zip(sources.of, scores, strict=True)]
        stored["source"] = np.concatenate(tokens).astype(np.int32)
    return HeldOut(probe, _storable(of_one), stored), means(scores, sources)


def _storable(scores: Arrays) -> dict[str, np.ndarray]:
    return {"nll": np.asarray(scores["nll"]), "top1": np.asarray(scores["top1"]).astype(np.int32)}
