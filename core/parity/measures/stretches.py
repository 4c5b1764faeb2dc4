"""Split large tensors into slices that fit a core's cache. Comparisons are sums over them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

# Elements of a slice. Candidate, twin, truth and intermediate results take 1.5 MiB in FP64.
STRETCH = 1 << 15


def stretches(size: int, length: int = STRETCH) -> Iterator[slice]:
    """Cut 0 … size into consecutive slices of `length`, the last one shorter."""
    return (slice(start, min(start + length, size)) for start in range(0, size, length))


class Space:
    """Memory for the results of one slice. The next slice overwrites it.

    The operating system zeroes each new block of this size, so allocation takes longer than the arithmetic.
    """

    def __init__(self, arrays: int) -> None:
        """Set the number of arrays that are in use at a time."""
        self._arrays, self._space = arrays, np.empty((arrays, 0))

    def of(self, size: int) -> np.ndarray:
        """Return uninitialised float64 arrays of shape (arrays, size)."""
        if self._space.shape[1] < size:
            self._space = np.empty((self._arrays, size))
        return self._space[:, :size]


def wide(x: np.ndarray, into: np.ndarray) -> np.ndarray:
    """Return x in float64: x itself if it is float64, else a conversion into `into`."""
    if x.dtype == np.float64:
        return x
    np.copyto(into, x)
    return into
