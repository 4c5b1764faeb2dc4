"""Batches: windows of tokens with the token after each as its target."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from core.backend import Batch
from core.data.dataset import TokenSplit
from core.data.sampler import BlockSampler
from core.errors import UserError


def train_batch(
    split: TokenSplit, sampler: BlockSampler, first_token: int, batch_size: int, sequence_length: int
) -> Batch:
    """The batch of a run that has seen `first_token` input tokens.

    Any part of it is the batch of its own first token: sample i is train_batch(split, sampler,
    first_token + i * sequence_length, 1, sequence_length).

    Returns:
        tokens and targets int32 (batch_size, sequence_length), weights float32 of ones.

    Raises:
        ValueError: the sampler is of a split of another size, or see `BlockSampler.window_starts`.
    """
    if sampler.num_tokens != split.num_tokens:
        raise ValueError(f"the sampler is made for {sampler.num_tokens} tokens, the split has {split.num_tokens}")
    return _batch_at(split, sampler.window_starts(first_token, batch_size, sequence_length), sequence_length)


def eval_batches(split: TokenSplit, batch_size: int, sequence_length: int, count: int) -> list[Batch]:
    """`count` fixed batches: batch_size * count windows spread evenly over the whole split, in its order.

    The inputs of two windows overlap only where the split is too short to hold them all apart.

    Returns:
        batches as in `train_batch`.

    Raises:
        UserError: the split is shorter than one window and its last target.
        ValueError: a size below one.
    """
    if min(batch_size, sequence_length, count) < 1:
        raise ValueError(f"sizes must be at least 1, got {batch_size}, {sequence_length}, {count}")
    last_start = split.num_tokens - (sequence_length + 1)
    if last_start < 0:
        raise UserError(
            f"the validation split has {split.num_tokens} tokens, a sequence of {sequence_length} needs one more than "
            "itself; raise the validation fraction, prepare more text or shorten the sequence"
        )
    windows = batch_size * count
    # Integers, because a float step would lose whole tokens in a long split.
    starts = np.arange(windows, dtype=np.int64) * last_start // max(1, windows - 1)
    return [_batch_at(split, part, sequence_length) for part in starts.reshape(count, batch_size)]


def _batch_at(split: TokenSplit, starts: NDArray[np.int64], sequence_length: int) -> Batch:
    windows = split.gather(starts, sequence_length + 1)
    tokens = np.ascontiguousarray(windows[:, :-1])
    targets = np.ascontiguousarray(windows[:, 1:])
    return Batch(tokens=tokens, targets=targets, weights=np.ones(tokens.shape, dtype=np.float32))
