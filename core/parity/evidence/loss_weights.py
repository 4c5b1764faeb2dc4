"""Replace a batch's loss weights by uneven or other ones; find the sequences that have any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from lockstep.core.backend import Arrays, Batch
from lockstep.core.model.names import GRADIENT


def uneven_weights(batch: Batch, seed: int) -> Batch:
    """Return the batch with loss weights that differ between sequences and between tokens.

    Sequence i keeps a share of its tokens that falls linearly from 1 to 1/4 over the batch (so micro-batches weigh
    differently and a mean of their means is not the mean), and kept tokens weigh 1 or 1/2 (so a weight that is taken
    for a mask shows). They depend on the seed and the batch's shape alone.
    """
    rows, length = batch.tokens.shape
    draw = np.random.Generator(np.random.Philox(key=seed)).random((2, rows, length), dtype=np.float32)
    share = np.linspace(1.0, 0.25, rows, dtype=np.float32)[:, None]
    weights = np.where(draw[0] < share, np.where(draw[1] < 0.5, np.float32(1.0), np.float32(0.5)), np.float32(0.0))
    weights[:, 0] = 1.0
    return replace(batch, weights=weights)


def reweighted_batches(micro: Batch) -> Iterator[Batch]:
    """Yield a micro-batch with other loss weights and its own gradients: all doubled, and one smaller by an ulp.

    A program that has a branch for weights that are all 1, or all alike, does not take it. The one is the first token
    with a weight, then the last: an ulp may bring a number to the other side of a tie, and what follows rounds anew.
    Smaller, so that the largest weight is twice what it was: a library's head scales all gradients by it.
    """
    weighted = np.flatnonzero(micro.weights)
    for token in (weighted[0], weighted[-1]):
        weights = 2 * micro.weights
        weights.flat[token] = np.nextafter(weights.flat[token], weights.dtype.type(0))
        yield replace(micro, weights=weights)


def weighted_rows(batch: Batch) -> np.ndarray:
    """Return the indices of the sequences that hold the batch's loss weight."""
    return np.flatnonzero(batch.weights.any(axis=1))


def weighted_part(batch: Batch) -> Batch:
    """Return those sequences alone."""
    return batch.rows(weighted_rows(batch))


def weighted_of(found: Mapping[str, np.ndarray], batch: Batch) -> Arrays:
    """Return taps of the sequences with weight; parameter gradients, and what is not shaped like a tap, whole."""
    return {name: weighted_tensor(name, value, batch) for name, value in found.items()}


def weighted_tensor(name: str, value: np.ndarray, batch: Batch) -> np.ndarray:
    """Return the sequences with weight of one tap; return whole what has no sequences."""
    tap = name.removeprefix(GRADIENT)
    whole = tap.endswith((".weight", ".bias")) or np.ndim(value) == 0 or len(value) != len(batch.tokens)
    return value if whole else value[weighted_rows(batch)]
