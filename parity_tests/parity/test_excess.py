"""Excess, gain difference and twin distance from arrays whose errors are known."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.core.parity.measures.distances import FLOOR_ULPS, distances

rng = np.random.default_rng(0)
TRUTH = rng.standard_normal(4096)
ROUNDING = 1e-3 * rng.standard_normal(4096)


def of(candidate, twin, truth=TRUTH):
    return distances(candidate, twin, truth, np.float32)


def test_the_twin_itself_has_excess_one_and_distance_zero():
    d = of(TRUTH + ROUNDING, TRUTH + ROUNDING)
    assert (d.twin_distance, d.gain_difference, d.unequal) == (0.0, 0.0, 0.0)
    # BLAS sums equal numbers in another order where they lie otherwise in memory: one ulp of each of two norms.
    assert d.excess == pytest.approx(1.0, rel=4 * np.finfo(float).eps)


def test_an_error_twice_as_large_has_excess_two():
    d = of(TRUTH + 2 * ROUNDING, TRUTH + ROUNDING)
    assert d.excess == pytest.approx(2.0)
    assert d.twin_distance == pytest.approx(1.0)
    assert d.relative_error == pytest.approx(2 * d.twin_relative_error)


def test_independent_rounding_of_equal_size_has_excess_near_one_and_distance_near_root_two():
    other = 1e-3 * np.random.default_rng(1).standard_normal(4096)
    d = of(TRUTH + other, TRUTH + ROUNDING)
    assert d.excess == pytest.approx(1.0, abs=0.05)
    assert d.twin_distance == pytest.approx(np.sqrt(2), abs=0.05)
    assert d.unequal == 1.0


def test_gain_sees_a_length_that_excess_hardly_sees():
    d = of((TRUTH + ROUNDING) * 1.0005, TRUTH + ROUNDING)
    assert d.gain_difference == pytest.approx(0.0005, rel=0.01)
    assert d.excess < 1.2


def test_more_exact_than_declared_is_far_below_one():
    assert of(TRUTH + ROUNDING / 100, TRUTH + ROUNDING).excess == pytest.approx(0.01, rel=0.01)


def test_exact_on_all_sides_is_floored_not_divided_by_zero():
    d = of(TRUTH, TRUTH)
    assert (d.excess, d.twin_distance) == (1.0, 0.0)
    assert d.twin_relative_error == pytest.approx(FLOOR_ULPS * np.finfo(np.float32).eps)


def test_a_zero_truth_is_compared_too():
    zero = np.zeros(8)
    assert of(zero, zero, zero).excess == 1.0
    assert of(np.full(8, 1e-6), zero, zero).excess > 1e6


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_infinitely_far(bad):
    broken = TRUTH.copy()
    broken[17] = bad
    d = of(broken, TRUTH + ROUNDING)
    assert d.excess == d.twin_distance == np.inf


def test_shapes_and_emptiness_are_refused():
    with pytest.raises(ValueError, match="shapes differ"):
        of(TRUTH[:-1], TRUTH)
    with pytest.raises(ValueError, match="nothing to compare"):
        of(np.zeros(0), np.zeros(0), np.zeros(0))
