"""Choose the micro-batch that a check examines, and its sequences with loss weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lockstep.core.backend import Batch
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence.loss_weights import uneven_weights, weighted_rows


def micro_to_probe(batch: Batch, config: RunConfig) -> Batch:
    """Return the first micro-batch; if attention uses documents, the first with several documents in a sequence."""
    micros = batch.cut(config.train)
    if config.attention.needs_documents:
        return next((micro for micro in micros if sequences_of_several_documents(micro).size), micros[0])
    return micros[0]


def probe_of(micro: Batch, config: RunConfig, seed: int | None = None, turn: int = 0) -> Batch:
    """Return `probe_batch` for a run. If sequences share the scales of FP8, all of them have weight.

    If attention uses documents, one of the sequences with weight has several, if any has. If sequences do not share
    scales, an end of text is among the inputs and among the targets with weight, if the batch has its token id.
    seed: seed of the loss weights; by default the run's.
    """
    rows: Sequence[int] = range(len(micro.tokens)) if config.precision.couples_sequences else ()
    if config.attention.needs_documents and not rows:
        rows = rows_in_turn(len(micro.tokens), turn)
        several = sequences_of_several_documents(micro).tolist()
        if several and not set(several) & set(rows):
            rows = sorted({several[turn % len(several)], rows[-1]})
    probe = probe_batch(micro, config.seed if seed is None else seed, rows, turn)
    # In FP8, a single changed token would change the rounding of all numbers.
    return probe if config.precision.couples_sequences else _with_end_of_text(probe)


def has_end_of_text(batch: Batch) -> bool:
    """Return whether an end of text is an input and a target with weight, in a batch that has its token id."""
    targets, inputs = batch.targets[batch.weights > 0], batch.tokens[weighted_rows(batch)]
    return bool((targets == batch.end_of_text).any() and (inputs == batch.end_of_text).any())


def _with_end_of_text(probe: Batch) -> Batch:
    """Return the probe with an end of text as last input of its last sequence with weight, and as the target before.

    A trainer may treat that token differently: its targets do not count (`ignore_index`), or its embedding has no
    gradient (`padding_idx`). Few batches contain one. All earlier tokens have the same bits as in the step, because
    attention is causal. The two tokens have weight 1. A probe that already has an end of text is unchanged.
    """
    if probe.end_of_text is None or has_end_of_text(probe) or probe.tokens.shape[1] < 2:
        return probe
    last = weighted_rows(probe)[-1]
    tokens, targets, weights = probe.tokens.copy(), probe.targets.copy(), probe.weights.copy()
    tokens[last, -1] = targets[last, -2] = probe.end_of_text
    weights[last, -2:] = 1.0
    return replace(probe, tokens=tokens, targets=targets, weights=weights)


def is_text_of(probe: Batch, micro: Batch) -> bool:
    """Return whether a probe was made from this micro-batch: equal except for an end of text in the last place."""
    same = np.array_equal(probe.tokens[:, :-1], micro.tokens[:, :-1])
    return same and np.array_equal(probe.targets[:, :-2], micro.targets[:, :-2])


def probe_batch(micro: Batch, seed: int, rows: Sequence[int] = (), turn: int = 0) -> Batch:
    """Return a micro-batch with uneven loss weights on `rows`, by default two, and zero weight on the others.

    The two are `turn` from the first and `turn` from the last. The last one has the highest index in every tensor,
    where tiles end and indices overflow. The others are chosen in turn, from check to check. A sequence without weight
    adds exactly zero to a gradient. So the reference computes only those with weight, while the candidate runs the
    program and shapes of training.
    """
    chosen = np.asarray(rows or rows_in_turn(len(micro.tokens), turn))
    weights = np.zeros_like(micro.weights)
    weights[chosen] = uneven_weights(micro.rows(chosen), seed).weights
    return replace(micro, weights=weights)


def rows_in_turn(size: int, turn: int) -> list[int]:
    """Return two of `size` sequences, `turn` from the first and from the last. For one sequence, return this one."""
    turn %= (size + 1) // 2
    # With an odd size, the middle sequence is paired with the one before it, because the reference's programs take two
    # sequences.
    low = turn if turn < size - 1 - turn else max(turn - 1, 0)
    return sorted({low, size - 1 - turn})


def sequences_of_several_documents(batch: Batch) -> np.ndarray:
    """Return the indices of the sequences with several documents, int64 (n,)."""
    if batch.documents is None:
        return np.zeros(0, int)
    return np.flatnonzero((np.diff(batch.documents, axis=1) > 0).any(axis=1))
