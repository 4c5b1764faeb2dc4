"""Batches: windows of tokens; the target of each token is the next token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lockstep.core.backend import Batch
from lockstep.core.data.sampler import Sampler
from lockstep.core.data.split import Split
from lockstep.core.errors import UserError


def train_batch(
    split: Split,
    sampler: Sampler,
    first_token: int,
    batch_size: int,
    sequence_length: int,
    end_of_text: int | None = None,
) -> Batch:
    """Return the batch of a run that has read `first_token` input tokens.

    A batch is the concatenation of its samples: sample i is train_batch(split, sampler,
    first_token + i * sequence_length, 1, sequence_length).

    Args:
        split: the tokens.
        sampler: selects the windows.
        first_token: number of input tokens before this batch.
        batch_size: sequences.
        sequence_length: tokens per sequence.
        end_of_text: the token that ends a document; with it, the batch has `documents` (see `documents_of`).

    Returns:
        tokens and targets, int32 (batch_size, sequence_length), and weights, float32 ones of that shape.

    Raises:
        ValueError: the sampler was made for another number of tokens, or see `Sampler.window_starts`.
    """
    if sampler.tokens != split.num_tokens:
        raise ValueError(f"the sampler is made for {sampler.tokens} tokens, the split has {split.num_tokens}")
    starts = sampler.window_starts(first_token, batch_size, sequence_length)
    return _batch_at(split, starts, sequence_length, end_of_text)


def eval_batches(
    split: Split, batch_size: int, sequence_length: int, count: int, end_of_text: int | None = None
) -> list[Batch]:
    """Return `count` fixed batches: batch_size * count windows, spread evenly over the whole split, in its order.

    Inputs of two windows overlap only if the split is too short for separate windows.

    Returns:
        batches as in `train_batch`.

    Raises:
        UserError: the split is shorter than one window and its last target.
        ValueError: a size is below one.
    """
    starts = eval_starts(split, batch_size * count, sequence_length)
    return batches_at(split, starts, batch_size, sequence_length, end_of_text)


def eval_starts(split: Split, windows: int, sequence_length: int) -> NDArray[np.int64]:
    """Return the starts of windows that are spread evenly over a split: int64 (windows,), ascending.

    Raises:
        UserError: the split is shorter than one window and its last target.
        ValueError: a size is below one.
    """
    if min(windows, sequence_length) < 1:
        raise ValueError(f"sizes must be at least 1, got {windows} windows of {sequence_length}")
    last_start = split.num_tokens - (sequence_length + 1)
    if last_start < 0:
        raise UserError(
            f"the validation split has {split.num_tokens} tokens, a sequence of {sequence_length} needs one more for "
            "its last target; raise the validation fraction, prepare more text or shorten the sequence"
        )
    # Use integers: with a float step, starts in a long split would be off by whole tokens.
    return np.arange(windows, dtype=np.int64) * last_start // max(1, windows - 1)


def batches_at(
    split: Split, starts: NDArray[np.int64], batch_size: int, sequence_length: int, end_of_text: int | None = None
) -> list[Batch]:
    """Return the batches of the windows at `starts`, int64 (batch_size * count,)."""
    return [_batch_at(split, part, sequence_length, end_of_text) for part in starts.reshape(-1, batch_size)]


def documents_of(tokens: NDArray[np.int32], end_of_text: int) -> NDArray[np.int32]:
    """Return the number of each token's document in its window: int32 of the shape (B, S) of `tokens`.

    The token `end_of_text` belongs to the document that it ends. The first token of every window has number 0, also
    inside a document or at its end.
    """
    documents = np.zeros_like(tokens)
    np.cumsum(tokens[:, :-1] == end_of_text, axis=1, out=documents[:, 1:])
    return documents


def _batch_at(split: Split, starts: NDArray[np.int64], sequence_length: int, end_of_text: int | None) -> Batch:
    windows = split.gather(starts, sequence_length + 1)
    # Allocate all three arrays at once: the system maps a large block with large pages, a small one page by page.
    tokens, targets, last = np.empty((3, len(starts), sequence_length), dtype=np.int32)
    tokens[:], targets[:] = windows[:, :-1], windows[:, 1:]
    weights = last.view(np.float32)
    weights.fill(1)
    documents = None if end_of_text is None else documents_of(tokens, end_of_text)
    return Batch(tokens, targets, weights, documents)
