"""Replace a batch's loss weights by uneven or other ones, and find the sequences with weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from lockstep.core.backend import Arrays, Batch
from lockstep.core.model.names import GRADIENT


def uneven_weights(batch: Batch, seed: int) -> Batch:
    """Return the batch with loss weights that differ between sequences and between tokens.

    The share of tokens with weight falls linearly from 1 in the first sequence to 1/4 in the last. So micro-batches
    have different weights, and the mean of their means is not the mean. Each weight is 1 or 1/2, which detects a
    program that uses weights as a mask. The weights depend only on the seed and the batch's shape.
    """
    rows, length = batch.tokens.shape
    draw = np.random.Generator(np.random.Philox(key=seed)).random((2, rows, length), dtype=np.float32)
    share = np.linspace(1.0, 0.25, rows, dtype=np.float32)[:, None]
    weights = np.where(draw[0] < share, np.where(draw[1] < 0.5, np.float32(1.0), np.float32(0.5)), np.float32(0.0))
    weights[:, 0] = 1.0
    return replace(batch, weights=weights)


def reweighted_batches(micro: Batch) -> Iterator[Batch]:
    """Yield a micro-batch with weights that hardly change its gradients: all doubled, and one smaller by an ulp.

    A program with a branch for weights that are all 1, or all equal, does not take this branch. The smaller weight is
    that of the first token with weight, then of the last, because an ulp may move a number across a tie and change
    later roundings. The changed weight is smaller, so that the largest weight is exactly doubled: a library's head
    scales all gradients by the largest.
    """
    weighted = np.flatnonzero(micro.weights)
    for token in (weighted[0], weighted[-1]):
        weights = 2 * micro.weights
        weights.flat[token] = np.nextafter(weights.flat[token], weights.dtype.type(0))
        yield replace(micro, weights=weights)


def weighted_rows(batch: Batch) -> np.ndarray:
    """Return the indices of the sequences with loss weight, int64 (n,)."""
    return np.flatnonzero(batch.weights.any(axis=1))


def weighted_part(batch: Batch) -> Batch:
    """Return the sequences with loss weight."""
    return batch.rows(weighted_rows(batch))


def weighted_of(found: Mapping[str, np.ndarray], batch: Batch) -> Arrays:
    """Return taps of the sequences with weight.

    Parameter gradients, and arrays of another shape, are returned whole.
    """
    return {name: weighted_tensor(name, value, batch) for name, value in found.items()}


def weighted_tensor(name: str, value: np.ndarray, batch: Batch) -> np.ndarray:
    """Return the sequences with weight of one tap (B, S, …). An array without sequences is returned whole."""
    tap = name.removeprefix(GRADIENT)
    whole = tap.endswith((".weight", ".bias")) or np.ndim(value) == 0 or len(value) != len(batch.tokens)
    return value if whole else value[weighted_rows(batch)]
