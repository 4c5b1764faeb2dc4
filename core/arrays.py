"""Arrays by name that lie elsewhere: what of them is known, or read, without the rest."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from lockstep.core.backend import Arrays


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


def part_of(arrays: Arrays, name: str, where: slice) -> np.ndarray:
    """Some elements of an array by name, row-major, as a flat array."""
    if isinstance(arrays, ReadsParts):
        return arrays.part(name, where.start, where.stop)
    return arrays[name].reshape(-1)[where]


def shape_of(arrays: Arrays, name: str) -> tuple[int, ...]:
    """The shape of an array by name."""
    return arrays.shape_of(name) if isinstance(arrays, HasShapes) else tuple(np.shape(arrays[name]))
