"""Sets of spans against sets of instants."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.profile.intervals import difference, gaps, intersection, length, union
from lockstep.parity_tests.slow_tests import amount

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12)
WINDOW = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda w: (min(w), max(w)))


def instants(spans):
    """Return the unit cells that the spans cover."""
    return {t for start, stop in spans for t in range(start, stop)}


def is_a_set(spans):
    return all(start < stop for start, stop in spans) and all(a[1] < b[0] for a, b in pairwise(spans))


@settings(max_examples=amount(100, with_all=300), derandomize=True)
@given(SPANS, SPANS, WINDOW)
def test_sets_of_spans_are_sets_of_instants(first, second, window):
    ours, theirs = union(first), union(second)
    assert is_a_set(ours) and instants(ours) == instants(first) and length(ours) == len(instants(first))
    both, less, free = intersection(ours, theirs), difference(ours, theirs), gaps(ours, window)
    assert instants(both) == instants(first) & instants(second)
    assert instants(less) == instants(first) - instants(second)
    assert instants(free) == set(range(*window)) - instants(first)
    for found in (both, less, free):
        assert all(start < stop for start, stop in found) and length(found) == len(instants(found))
