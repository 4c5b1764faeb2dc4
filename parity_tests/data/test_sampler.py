"""An epoch visits every token once, whatever the sequence length does, and any part is computed alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.data.permutation import permute
from lockstep.core.data.sampler import _STRETCH, BlockSampler
from lockstep.core.errors import UserError

BLOCK = 24
LENGTHS = [1, 2, 3, 4, 6, 8, 12, 24]


def visited(starts, length):
    return (starts[:, None] + np.arange(length)).ravel()


@given(
    blocks=st.integers(1, 60),
    spare=st.integers(0, BLOCK - 1),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 5),
    cuts=st.lists(st.tuples(st.integers(0, 60), st.sampled_from(LENGTHS)), max_size=5),
)
@settings(max_examples=150)
def test_one_epoch_visits_every_token_once_though_the_length_changes(blocks, spare, seed, epoch, cuts):
    sampler = BlockSampler(seed, blocks * BLOCK + 1 + spare, BLOCK)
    assert sampler.num_blocks == blocks
    changes = sorted((min(at, blocks), length) for at, length in cuts)
    borders = [0, *(at for at, _ in changes), blocks]
    lengths = [BLOCK, *(length for _, length in changes)]
    seen = []
    for begin, end, length in zip(borders[:-1], borders[1:], lengths, strict=True):
        first = (epoch * blocks + begin) * BLOCK
        seen.append(visited(sampler.window_starts(first, (end - begin) * BLOCK // length, length), length))
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(blocks * BLOCK))


@given(
    blocks=st.integers(1, 40),
    length=st.sampled_from(LENGTHS),
    first=st.integers(0, 500),
    count=st.integers(0, 200),
    data=st.data(),
)
def test_any_part_is_the_slice_of_the_whole(blocks, length, first, count, data):
    sampler = BlockSampler(5, blocks * BLOCK + 1, BLOCK)
    whole = sampler.window_starts(first * length, count, length)
    assert whole.dtype == np.int64 and whole.shape == (count,)
    begin = data.draw(st.integers(0, count))
    end = data.draw(st.integers(begin, count))
    part = sampler.window_starts((first + begin) * length, end - begin, length)
    assert np.array_equal(part, whole[begin:end])


@pytest.mark.parametrize("blocks", [7, 1000, _STRETCH, 10**7])
@pytest.mark.parametrize("first", [0, _STRETCH - 3, 2 * _STRETCH - 1, 5 * _STRETCH, 10**12])
@pytest.mark.parametrize("count", [1, 6, 2 * _STRETCH + 2])
def test_the_order_is_that_of_the_permutation_wherever_a_batch_begins(blocks, first, count):
    sampler = BlockSampler(8, blocks * BLOCK + 1, BLOCK)
    epochs, indices = np.divmod(first + np.arange(count), blocks)
    expected = permute(indices, epochs, blocks, 8) * BLOCK
    assert np.array_equal(sampler.window_starts(first * BLOCK, count, BLOCK), expected)


@given(length=st.sampled_from(LENGTHS), blocks=st.integers(1, 30))
def test_a_shorter_length_cuts_blocks(length, blocks):
    sampler = BlockSampler(1, blocks * BLOCK + 1, BLOCK)
    long = visited(sampler.window_starts(0, 2 * blocks, BLOCK), BLOCK)
    short = visited(sampler.window_starts(0, 2 * blocks * BLOCK // length, length), length)
    assert np.array_equal(long, short)


def test_every_target_is_inside_the_split():
    for num_tokens in range(BLOCK + 1, 4 * BLOCK):
        sampler = BlockSampler(0, num_tokens, BLOCK)
        starts = sampler.window_starts(0, 3 * sampler.num_blocks, BLOCK)
        assert starts.max() + BLOCK < num_tokens


def test_epochs_and_seeds_differ():
    epochs = BlockSampler(0, 1000 * BLOCK + 1, BLOCK).window_starts(0, 2000, BLOCK).reshape(2, 1000)
    other = BlockSampler(1, 1000 * BLOCK + 1, BLOCK).window_starts(0, 1000, BLOCK)
    assert (epochs[0] == epochs[1]).mean() < 0.02 and (epochs[0] == other).mean() < 0.02


def test_positions_far_into_a_long_run():
    sampler = BlockSampler(3, 10**13, 4096)
    starts = sampler.window_starts(4096 * 10**10, 1000, 4096)
    assert np.array_equal(np.unique(starts % 4096), [0]) and np.unique(starts).size == 1000
    assert starts.max() > 10**12


@pytest.mark.parametrize(
    ("first", "count", "length"), [(0, 1, 5), (0, 1, 0), (0, 1, 48), (1, 1, 2), (-2, 1, 2), (0, -1, 2)]
)
def test_lengths_that_do_not_divide_are_refused(first, count, length):
    with pytest.raises(ValueError):
        BlockSampler(0, 1000, BLOCK).window_starts(first, count, length)


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(UserError, match="24 tokens, a sequence of 24"):
        BlockSampler(0, BLOCK, BLOCK)
    assert BlockSampler(0, BLOCK + 1, BLOCK).num_blocks == 1
    for seed, length in ((-1, 4), (2**64, 4), (0, 0)):
        with pytest.raises(ValueError):
            BlockSampler(seed, 100, length)
