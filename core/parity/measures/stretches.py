"""Split large tensors into stretches that fit a core's cache: comparisons are sums over them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

# Elements of a stretch: in FP64, candidate, twin, truth and what is made of them take 1.5 MiB.
STRETCH = 1 << 15


def stretches(size: int, length: int = STRETCH) -> Iterator[slice]:
    """Cut 0 … size into consecutive slices of `length`, the last one shorter."""
    return (slice(start, min(start + length, size)) for start in range(0, size, length))


class Space:
    """Memory for the results of one stretch, which the next one overwrites.

    The system zeroes each new block of memory of this size: allocating takes longer than the arithmetic.
    """

    def __init__(self, arrays: int) -> None:
        """Take how many arrays are in use at a time."""
        self._arrays, self._space = arrays, np.empty((arrays, 0))

    def of(self, size: int) -> np.ndarray:
        """Return float64 arrays (arrays, size), whose numbers are whatever was there."""
        if self._space.shape[1] < size:
            self._space = np.empty((self._arrays, size))
        return self._space[:, :size]


def wide(x: np.ndarray, into: np.ndarray) -> np.ndarray:
    """Return x in float64: itself if it is, else converted into memory of its size."""
    if x.dtype == np.float64:
        return x
    np.copyto(into, x)
    return into
