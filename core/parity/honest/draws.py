"""Draws: the given inputs, and inputs a few roundings away from them, for which every rounding is drawn again.

A relative change of at most two units in the last place preserves zeros, signs, infinities of masks, one-hot rows and
the meaning of a function. Only the roundings change. Gradients of outputs are random from a seed, and equal for all
compared functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.core.errors import UserError
from lockstep.core.parity.honest.function import EPS, Given, rounded

__tracebackhide__ = True

# A value changes by at most this many units in the last place at 1.
REACH = 2.0
# A relative change small enough for a derivative, and large enough to exceed FP64's own rounding.
SMALL = 2.0**-20
# (largest count of numbers in the inputs, number of draws) for small and ordinary problems.
COUNTS = ((1 << 16, 32), (1 << 24, 8))
LEAST_DRAWS = 3


def draws_of(numbers: int) -> int:
    """Return the default number of draws. Few numbers need more draws, and large inputs make each draw expensive."""
    return next((count for size, count in COUNTS if numbers <= size), LEAST_DRAWS)


class Draws:
    """Inputs and gradients of outputs, by draw. Draw 0 has the given inputs.

    dtype: dtype of the gradients of outputs.
    grad: the user's gradients of outputs by name, None for an output without one; {} for random ones.
    """

    def __init__(self, inputs: Sequence[Given], dtype: str, seed: int, grad: Mapping[str, np.ndarray | None]) -> None:
        self._inputs = {one.name: one for one in inputs if one.values is not None}
        self._dtype, self._seed, self._grad = dtype, seed, grad

    def values(self, draw: int) -> dict[str, np.ndarray]:
        """Return floating-point inputs by name, float64 arrays of numbers in their dtype."""
        return {name: self._near(self._value(name), draw, i) for i, name in enumerate(self._inputs)}

    def cotangents(self, draw: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        """Return gradients of outputs of these shapes, in the dtype. Raises UserError if `grad` has other shapes."""
        found = {}
        for i, (name, shape) in enumerate(shapes.items()):
            if not self._grad:
                random = np.random.default_rng([self._seed, draw, 1, i])
                found[name] = rounded(random.standard_normal(shape), self._dtype)
                continue
            if name not in self._grad:
                raise UserError(
                    f"grad= has {', '.join(self._grad)}; there is an output {name} as well (None: no gradient)"
                )
            if (mine := self._grad[name]) is not None:
                if mine.shape != shape:
                    raise UserError(f"grad= of {name} has shape {mine.shape}, the output {shape}")
                random = np.random.default_rng([self._seed, draw, 1, i])
                found[name] = self._beside(rounded(mine, self._dtype), random, draw, self._dtype)
        return found

    def responding(self, values: Mapping[str, np.ndarray], salt: int) -> dict[str, np.ndarray]:
        """Multiply each value by 1 + SMALL · a normal number. Returns float64 arrays of the same shapes.

        The change of a result shows its conditioning.
        """
        return {
            name: np.asarray(
                x * (1 + SMALL * np.random.default_rng([self._seed, salt, 2, i]).standard_normal(self._once(name, x)))
            )
            for i, (name, x) in enumerate(values.items())
        }

    def one_changed(self, x: np.ndarray, index: int) -> np.ndarray | None:
        """Return a copy of an array in which one non-zero number is larger by a thousandth; None if all are zero."""
        where = np.flatnonzero(np.isfinite(x) & (x != 0))
        if not where.size:
            return None
        at = np.random.default_rng([self._seed, 3, index]).choice(where)
        changed = x.copy()
        changed.reshape(-1)[at] *= 1 + 1e-3
        return changed

    def _value(self, name: str) -> np.ndarray:
        found = self._inputs[name].values
        assert found is not None
        return found

    def _once(self, name: str, x: np.ndarray) -> tuple[int, ...]:
        one = self._inputs.get(name)
        return one.once if one is not None else x.shape

    def _near(self, x: np.ndarray, draw: int, index: int) -> np.ndarray:
        name = list(self._inputs)[index]
        random = np.random.default_rng([self._seed, draw, 0, index])
        return self._beside(x, random, draw, self._inputs[name].dtype, self._once(name, x))

    def _beside(
        self, x: np.ndarray, random: np.random.Generator, draw: int, dtype: str, once: tuple[int, ...] | None = None
    ) -> np.ndarray:
        if not draw:
            return x
        reach = REACH * EPS[dtype]
        moved = rounded(x * (1 + random.uniform(-reach, reach, x.shape if once is None else once)), dtype)
        return np.where(np.isfinite(moved) == np.isfinite(x), moved, x)
