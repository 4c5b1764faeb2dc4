"""Batches hold the sampler's windows and their next tokens."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.core.data.batches import documents_of, eval_batches, train_batch
from lockstep.core.data.dataset import TokenSplit
from lockstep.core.data.sampler import BlockSampler
from lockstep.core.errors import UserError


def counting(size) -> TokenSplit:
    """Return a split whose tokens are their own positions, in three shards."""
    return TokenSplit(np.array_split(np.arange(size, dtype=np.uint16), 3))


def test_targets_are_the_next_tokens():
    split, sampler = counting(1001), BlockSampler(4, 1001, 20)
    batch = train_batch(split, sampler, 40, 6, 10)
    assert batch.tokens.shape == batch.targets.shape == batch.weights.shape == (6, 10)
    assert (batch.tokens.dtype, batch.targets.dtype, batch.weights.dtype) == (np.int32, np.int32, np.float32)
    assert batch.tokens.flags.c_contiguous and batch.targets.flags.c_contiguous
    assert np.array_equal(batch.targets, batch.tokens + 1) and (batch.weights == 1).all()
    assert np.array_equal(batch.tokens[:, 0], sampler.window_starts(40, 6, 10))


def test_batches_share_no_memory():
    split, sampler = counting(1001), BlockSampler(4, 1001, 20)
    one, other = train_batch(split, sampler, 0, 6, 10), train_batch(split, sampler, 0, 6, 10)
    digest = other.digest()
    for array in one.arrays.values():
        array[:] = 0
        assert other.digest() == digest
    assert np.array_equal(one.targets, one.tokens) and train_batch(split, sampler, 0, 6, 10).digest() == digest


def test_large_ids_come_through():
    tokens = np.arange(70_000, 71_001, dtype=np.uint32)
    batch = train_batch(TokenSplit(np.array_split(tokens, 3)), BlockSampler(4, 1001, 20), 0, 50, 20)
    assert np.array_equal(np.sort(batch.tokens.ravel()), tokens[:-1])
    assert np.array_equal(batch.targets, batch.tokens + 1)


def test_a_sample_does_not_depend_on_its_batch():
    split, sampler = counting(1001), BlockSampler(4, 1001, 20)
    whole = train_batch(split, sampler, 0, 12, 10)
    parts = [train_batch(split, sampler, first * 10, 3, 10) for first in range(0, 12, 3)]
    assert np.array_equal(whole.tokens, np.concatenate([part.tokens for part in parts]))


def test_an_epoch_reads_the_split():
    split, sampler = counting(1001), BlockSampler(4, 1001, 20)
    seen = [train_batch(split, sampler, first * 20, 5, 20).tokens.ravel() for first in range(0, 50, 5)]
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(1000))


def test_a_sampler_of_another_split_is_refused():
    with pytest.raises(ValueError, match="1001"):
        train_batch(counting(1000), BlockSampler(4, 1001, 20), 0, 1, 20)


@pytest.mark.parametrize(
    ("size", "batch_size", "length", "count"), [(1001, 4, 10, 25), (1001, 3, 10, 5), (65, 2, 8, 4)]
)
def test_evaluation_windows_are_spread_without_overlap(size, batch_size, length, count):
    batches = eval_batches(counting(size), batch_size, length, count)
    assert len(batches) == count and all(batch.tokens.shape == (batch_size, length) for batch in batches)
    starts = np.concatenate([batch.tokens[:, 0] for batch in batches])
    assert starts[0] == 0 and starts[-1] == size - length - 1
    assert np.diff(starts).min() >= length and np.ptp(np.diff(starts)) <= 1
    assert all(np.array_equal(batch.targets, batch.tokens + 1) for batch in batches)


def test_evaluation_is_the_same_every_time_and_fits_a_short_split():
    one, two = eval_batches(counting(30), 4, 8, 3), eval_batches(counting(30), 4, 8, 3)
    assert [batch.digest() for batch in one] == [batch.digest() for batch in two]
    (only,) = eval_batches(counting(9), 2, 8, 1)
    assert only.tokens[:, 0].tolist() == [0, 0]


def test_a_split_shorter_than_a_window_is_refused():
    with pytest.raises(UserError, match="8 tokens, a sequence of 8"):
        eval_batches(counting(8), 1, 8, 1)
    with pytest.raises(ValueError):
        eval_batches(counting(100), 1, 8, 0)


END = 9


@pytest.mark.parametrize(
    ("tokens", "documents"),
    [
        ([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 0]),
        ([1, 2, END, 4, 5, 6], [0, 0, 0, 1, 1, 1]),
        ([END, 2, 3, 4, 5, 6], [0, 1, 1, 1, 1, 1]),
        ([1, 2, 3, 4, 5, END], [0, 0, 0, 0, 0, 0]),
        ([1, END, END, 4, END, 6], [0, 0, 1, 2, 2, 3]),
    ],
    ids=["within one", "a boundary", "begins with an end", "ends with an end", "an empty one"],
)
def test_the_end_of_text_belongs_to_what_it_ends(tokens, documents):
    found = documents_of(np.array([tokens, [1] * 6], np.int32), END)
    assert found.dtype == np.int32
    assert found.tolist() == [documents, [0] * 6]


def test_documents_are_told_where_the_end_of_text_is_given():
    tokens = np.arange(1001, dtype=np.uint16)
    tokens[::7] = 5000
    split, sampler = TokenSplit(np.array_split(tokens, 3)), BlockSampler(4, 1001, 20)
    assert train_batch(split, sampler, 0, 4, 20).documents is None
    assert all(batch.documents is None for batch in eval_batches(split, 2, 20, 3))
    batches = [train_batch(split, sampler, 0, 4, 20, 5000), *eval_batches(split, 2, 20, 3, 5000)]
    for batch in batches:
        assert batch.documents is not None
        assert np.array_equal(batch.documents, documents_of(batch.tokens, 5000))
        # 20 tokens hold two or three ends; one in the last place opens nothing.
        assert set(batch.documents.max(1).tolist()) <= {2, 3}


def test_a_sample_s_documents_do_not_depend_on_its_batch():
    tokens = np.arange(1001, dtype=np.uint16) % 50
    split, sampler = TokenSplit([tokens]), BlockSampler(4, 1001, 20)
    whole = train_batch(split, sampler, 0, 6, 20, 3)
    parts = [train_batch(split, sampler, first * 20, 2, 20, 3) for first in range(0, 6, 2)]
    assert np.array_equal(whole.documents, np.concatenate([part.documents for part in parts]))
    assert [p.digest() for p in parts] == [p.digest() for p in whole.micro_batches(2)]
