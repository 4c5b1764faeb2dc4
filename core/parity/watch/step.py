"""One step of a user's loop as a check reads it, and its tensors in FP64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.core.backend import Arrays
from lockstep.core.parity.watch.snapshot import Snapshot
from lockstep.core.parity.watch.update_rules import ROUNDINGS, Rule

NARROW = ("bfloat16", "float16")


@dataclass(frozen=True)
class Step:
    """Tensors and settings of one step, by the model's parameter names.

    number: number of the step, counted from 1.
    loss: None if none was given.
    outputs: other tensors of the forward pass, by the reference's names.
    params: weights at the beginning of the block.
    grads: gradients before clipping.
    before, after: one snapshot an optimizer, right before and right after its step.
    fired: number of steps of each optimizer inside the block.
    frozen: names of parameters without `requires_grad`.
    dtypes: name → dtype of the parameter.
    rules, kinds: update rule and class name of each optimizer.
    """

    number: int
    loss: float | None
    outputs: Arrays
    params: Arrays
    grads: Arrays
    before: list[Snapshot]
    after: list[Snapshot]
    fired: Sequence[int]
    frozen: frozenset[str]
    dtypes: Mapping[str, str]
    rules: Sequence[Rule | None]
    kinds: Sequence[str]


class Widened(Mapping[str, np.ndarray]):
    """A read-only mapping of arrays in FP64, times a factor. Each array is widened when it is read, to save memory.

    dtypes: name → dtype of the weights. Gradients of narrow weights are rounded to it first.
    """

    def __init__(self, arrays: Arrays, dtypes: Mapping[str, str] | None = None, factor: float = 1.0) -> None:
        self._arrays, self._dtypes, self._factor = arrays, dtypes, factor

    def __getitem__(self, name: str) -> np.ndarray:
        found = self._arrays[name].astype(np.float64, copy=False)
        found = _as_kept(found, self._dtypes[name]) if self._dtypes else found
        return self._factor * found if self._factor != 1 else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _as_kept(gradient: np.ndarray, dtype: str) -> np.ndarray:
    """Round a gradient to the dtype in which `.grad` holds it: that of its weights."""
    return ROUNDINGS[dtype](gradient) if dtype in NARROW else gradient


def norm(arrays: Arrays) -> float:
    """Return the L2 norm of all tensors together, in FP64."""
    return math.sqrt(math.fsum(float(np.square(g, dtype=np.float64).sum()) for g in arrays.values()))


def relative(w: Arrays, t: Arrays) -> float:
    """Return ‖w − t‖ / ‖t‖ over all tensors of t; 0 if they are zero."""
    size = norm(t)
    return math.sqrt(math.fsum(squares(w[name], 1.0, t[name]) for name in t)) / size if size else 0.0


def squares(c: np.ndarray, k: float, t: np.ndarray) -> float:
    """Sum (c − k·t)² in FP64.

    One tensor is widened at a time, because all together take as much memory as the model.
    """
    return float(np.square(c.astype(np.float64) - k * t.astype(np.float64)).sum())
