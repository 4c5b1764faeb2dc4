"""Arrays by name that lie elsewhere: what of them is known, or read, without the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from lockstep.core.backend import Arrays


@runtime_checkable
class ReadsParts(Protocol):
    """Arrays by name that are read from elsewhere, a part at a time."""

    def part(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return the elements start to stop of an array, row-major, as a flat array."""
        ...


@runtime_checkable
class HasShapes(Protocol):
    """Arrays by name whose shapes are known without reading them."""

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of an array."""
        ...


@runtime_checkable
class HasDigests(Protocol):
    """Arrays by name whose digests are known without reading them."""

    def digest(self, name: str) -> str:
        """Return the digest of an array's bits and shape."""
        ...


def part_of(arrays: Arrays, name: str, where: slice) -> np.ndarray:
    """Return some elements of an array by name, row-major, as a flat array."""
    if isinstance(arrays, ReadsParts):
        return arrays.part(name, where.start, where.stop)
    return arrays[name].reshape(-1)[where]


def rows_of(arrays: Arrays, name: str, rows: slice) -> np.ndarray:
    """Return some rows (a stretch of the first axis) of an array by name."""
    shape = shape_of(arrays, name)
    size = math.prod(shape[1:])
    return part_of(arrays, name, slice(rows.start * size, rows.stop * size)).reshape(-1, *shape[1:])


def shape_of(arrays: Arrays, name: str) -> tuple[int, ...]:
    """Return the shape of an array by name."""
    return arrays.shape_of(name) if isinstance(arrays, HasShapes) else tuple(np.shape(arrays[name]))


class Scaled(Mapping[str, np.ndarray]):
    """Arrays by name, of which those whose names begin with `prefix` are multiplied by `factor` when they are read."""

    def __init__(self, arrays: Arrays, factor: float | np.floating, prefix: str = "") -> None:
        self._arrays, self._factor, self._prefix = arrays, factor, prefix

    def __getitem__(self, name: str) -> np.ndarray:
        return self._times(name, self._arrays[name])

    def part(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return some elements, as in `ReadsParts`."""
        return self._times(name, part_of(self._arrays, name, slice(start, stop)))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Implement `HasShapes.shape_of`."""
        return shape_of(self._arrays, name)

    def _times(self, name: str, value: np.ndarray) -> np.ndarray:
        return value * self._factor if name.startswith(self._prefix) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class Cut(Mapping[str, np.ndarray]):
    """Arrays by name of which a part alone is there, read by where its elements stand in the whole."""

    def __init__(self, arrays: Arrays, starts: Mapping[str, int]) -> None:
        """Take the parts, and the place of each in its whole.

        arrays: the parts. starts: for each, the number of its first element in the whole, row-major.
        """
        self._arrays, self._starts = arrays, starts

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def part(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return some elements of the whole, as in `ReadsParts`; all lie in the part that is there."""
        first = self._starts[name]
        return part_of(self._arrays, name, slice(start - first, stop - first))

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def bit_equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays hold the same bits: NaN equals NaN, and −0 is not 0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    # In words as wide as the numbers, since bytes one by one take longer.
    words = f"u{one.itemsize}" if one.itemsize in (1, 2, 4, 8) else "u1"
    a, b = (np.ascontiguousarray(array).reshape(-1).view(words) for array in (one, other))
    return np.array_equal(a, b)
