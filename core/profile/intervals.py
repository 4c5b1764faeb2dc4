"""Arithmetic of sets of time spans. A span is (start, stop); a set is sorted, and its spans neither touch nor meet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the set of all instants that lie in any of the spans; those without length are nothing."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if stop <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined


def intersection(ours: Sequence[Span], theirs: Sequence[Span]) -> list[Span]:
    """Return the instants that lie in both sets."""
    found: list[Span] = []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        start, stop = max(ours[i][0], theirs[j][0]), min(ours[i][1], theirs[j][1])
        if start < stop:
            found.append((start, stop))
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(ours: Sequence[Span], theirs: Sequence[Span]) -> list[Span]:
    """Return the instants of the first set that do not lie in the second."""
    if not ours:
        return []
    return intersection(ours, gaps(theirs, (ours[0][0], ours[-1][1])))


def gaps(spans: Sequence[Span], window: Span) -> list[Span]:
    """Return the instants of the window that do not lie in the set."""
    found: list[Span] = []
    at, end = window
    for start, stop in spans:
        if start >= end:
            break
        if start > at:
            found.append((at, start))
        at = max(at, stop)
    return [*found, (at, end)] if at < end else found


def length(spans: Iterable[Span]) -> float:
    """Return how long the spans of a set are together."""
    return sum(stop - start for start, stop in spans)
