"""Go through large tensors a stretch at a time: what is compared of them is sums, and a stretch fits a core's cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np

from lockstep.core.backend import Arrays

# Elements of a stretch: in FP64, one of candidate, twin and truth together take 6 MiB.
STRETCH = 1 << 18


@runtime_checkable
class ReadsParts(Protocol):
    """Arrays by name that are read from elsewhere, a part at a time."""

    def part(self, name: str, start: int, stop: int) -> np.ndarray:
        """Elements start to stop of an array, row-major, as a flat array."""
        ...


@runtime_checkable
class HasShapes(Protocol):
    """Arrays by name whose shapes are known without reading them."""

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of an array."""
        ...


@runtime_checkable
class HasDigests(Protocol):
    """Arrays by name whose digests are known without reading them."""

    def digest(self, name: str) -> str:
        """The digest of an array's bits and shape."""
        ...


def stretches(size: int, length: int = STRETCH) -> Iterator[slice]:
    """Cut 0 … size into consecutive slices of `length`, the last one shorter."""
    return (slice(start, min(start + length, size)) for start in range(0, size, length))


def part_of(arrays: Arrays, name: str, where: slice) -> np.ndarray:
    """Some elements of an array by name, row-major, as a flat array."""
    if isinstance(arrays, ReadsParts):
        return arrays.part(name, where.start, where.stop)
    return arrays[name].reshape(-1)[where]


def shape_of(arrays: Arrays, name: str) -> tuple[int, ...]:
    """The shape of an array by name."""
    return arrays.shape_of(name) if isinstance(arrays, HasShapes) else tuple(np.shape(arrays[name]))
