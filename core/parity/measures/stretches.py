"""Go through large tensors a stretch at a time: what is compared of them is sums, and a stretch fits a core's cache."""

from __future__ import annotations

from collections.abc import Iterator

# Elements of a stretch: in FP64, one of candidate, twin and truth together take 6 MiB.
STRETCH = 1 << 18


def stretches(size: int, length: int = STRETCH) -> Iterator[slice]:
    """Cut 0 … size into consecutive slices of `length`, the last one shorter."""
    return (slice(start, min(start + length, size)) for start in range(0, size, length))
