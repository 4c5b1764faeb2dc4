"""The shuffle is a bijection for every size, and passes for one drawn at random."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.data import permutation
from lockstep.core.data.permutation import permute


def whole(size, epoch=0, seed=0):
    indices = np.arange(size, dtype=np.int64)
    return permute(indices, np.full_like(indices, epoch), size, seed)


def chi_square(counts) -> float:
    """Pearson's statistic against equal counts."""
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "size", [1, 2, 3, 4, 5, 7, 8, 13, 15, 16, 17, 64, 97, 255, 256, 257, 1009, 4096, 4097, 65_536, 100_003]
)
def test_a_bijection(size):
    for seed, epoch in ((0, 0), (1, 5), (2**64 - 1, 2**40)):
        assert np.array_equal(np.sort(whole(size, epoch, seed)), np.arange(size))


@given(size=st.integers(1, 3000), epoch=st.integers(0, 2**62), seed=st.integers(0, 2**64 - 1))
def test_a_bijection_for_any_size_epoch_and_seed(size, epoch, seed):
    assert np.array_equal(np.sort(whole(size, epoch, seed)), np.arange(size))


def test_huge_domains_stay_inside_and_apart():
    size = (1 << 48) + 1
    indices = np.random.default_rng(0).integers(0, size, 100_000)
    found = permute(indices, np.zeros_like(indices), size, 3)
    assert found.min() >= 0 and found.max() < size
    assert np.unique(found).size == np.unique(indices).size


def test_the_order_is_pinned():
    # A change of the order would silently change what a resumed run reads.
    assert whole(10, 0, 0).tolist() == [9, 0, 1, 4, 8, 2, 6, 5, 7, 3]
    assert whole(1000, 3, 1234)[:6].tolist() == [532, 968, 713, 336, 63, 836]


def test_every_part_is_the_slice_of_the_whole():
    size = 1000
    indices = np.random.default_rng(1).integers(0, size, (7, 11))
    assert np.array_equal(permute(indices, np.full_like(indices, 4), size, 9), whole(size, 4, 9)[indices])


def test_mixed_epochs_are_each_their_own():
    indices, epochs = np.meshgrid(np.arange(50), np.arange(6))
    found = permute(indices, epochs, 50, 2)
    assert np.array_equal(found, [whole(50, epoch, 2) for epoch in range(6)])


def test_seeds_and_epochs_give_unrelated_orders():
    size = 10_000
    orders = [whole(size, epoch, seed) for epoch in (0, 1, 2) for seed in (0, 1, 2)]
    orders.append(np.arange(size))
    for number, one in enumerate(orders):
        for other in orders[:number]:
            # Fixed points of a random permutation are Poisson with mean 1; P(> 12) is below 1e-9.
            assert (one == other).sum() <= 12
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(size)


def test_indices_move_as_far_as_in_a_random_order():
    size = 20_000
    # E|i - pi(i)| = (n² - 1) / 3n; the standard deviation of the mean is about n sqrt(2 / 45 n).
    for seed in range(5):
        moved = np.abs(whole(size, seed, seed) - np.arange(size)).mean()
        assert abs(moved - size / 3) < 5 * size * np.sqrt(2 / (45 * size))


def test_neighbours_part():
    size = 20_000
    steps = np.abs(np.diff(whole(size)))
    assert abs(steps.mean() - size / 3) < 5 * size * np.sqrt(1 / (18 * size)) * 1.5
    assert (steps == 1).sum() < 20  # 2 expected


@pytest.mark.parametrize("size", [2, 3, 5, 10, 16, 37])
def test_every_index_goes_everywhere_equally_often(size):
    epochs = 4000
    indices, epoch = np.meshgrid(np.arange(size), np.arange(epochs))
    found = permute(indices, epoch, size, 7)
    for index in range(size):
        statistic = chi_square(np.bincount(found[:, index], minlength=size))
        # Chi-square with k = size - 1 degrees of freedom has mean k and variance 2k; P(> k + 6 sqrt(2k) + 12) < 1e-6.
        assert statistic < (size - 1) + 6 * np.sqrt(2 * (size - 1)) + 12


def test_all_orders_of_three_are_equally_frequent():
    indices, epoch = np.meshgrid(np.arange(3), np.arange(12_000))
    found = permute(indices, epoch, 3, 0) @ np.array([9, 3, 1])
    counts = np.unique(found, return_counts=True)[1]
    assert counts.size == 6 and chi_square(counts) < 35  # 5 degrees of freedom: P < 2e-6


def test_positions_are_even_over_the_range():
    size, bins = 100_000, 100
    for seed in range(3):
        counts = np.bincount(whole(size, 0, seed)[: size // 4] * bins // size, minlength=bins)
        assert chi_square(counts) < bins + 6 * np.sqrt(2 * bins)


@pytest.mark.parametrize("rounds", [1, 2])
def test_too_few_rounds_are_caught(monkeypatch, rounds):
    monkeypatch.setattr(permutation, "_ROUNDS", rounds)
    with pytest.raises(AssertionError):
        test_positions_are_even_over_the_range()
        test_neighbours_part()


@pytest.mark.parametrize(
    ("indices", "epochs", "size", "seed"),
    [([5], [0], 5, 0), ([-1], [0], 5, 0), ([0], [-1], 5, 0), ([0], [0], 0, 0), ([0], [0, 1], 5, 0), ([0], [0], 5, -1)],
)
def test_what_is_out_of_range_is_refused(indices, epochs, size, seed):
    with pytest.raises(ValueError):
        permute(np.array(indices), np.array(epochs), size, seed)
