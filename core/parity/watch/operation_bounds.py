"""Measures of one operation's result against its formula on the same inputs, and their bounds.

Let c be the result, t the truth (the formula in FP64) and w the twin (the formula in FP32, rounded to the dtype of c).
The unit of each measure is the honest error: the twin's error, or the error that no kernel can avoid (`Sides.floor`) if
that is larger::

    rounding      ulp(t)²/12, the variance of one rounding to the dtype of c, and (2 ulp of FP32 · t)²
    summation     ρ²·(n/2)·(t² + κ²), the variance of n FP32 additions (core/parity/honest/measures.py)

    excess        ‖c − t‖ in honest errors
    row, column   the largest ‖c − t‖ of a row, in honest errors of that row, or of the mean row if those are larger
    gain          ⟨c − w, t⟩ / ⟨t, t⟩; without a twin, ⟨c − t, t⟩ / ⟨t, t⟩
    unequal       count of c ≠ w, for operations that compute in FP32 and round each number once

A kernel may round at ROUNDINGS places where the formula rounds at one, so its error may be ROOM times as large. The
norm of m independent normal errors of unit variance exceeds √m + √(2·ln(1/p)) with a probability of at most p (Laurent
and Massart 2000, lemma 1). So the largest of R rows is within 1 + √(2·ln(R/RARE)/m) of its unit. RARE allows for the
thousands of comparisons of a check. κ, the response to relative changes of the inputs, is zero at first. A result that
breaks a bound is judged again with κ, and with twins on inputs near the given ones, so that no alarm rests on one
random draw.

Two computations in FP32 with an error e each round to different neighbours with a probability of at most 2·ROOM·e /
ulp(t). Let λ be the sum of these probabilities over all numbers. Then the count k of differences satisfies k ≤ λ +
√(2·λ·ln(1/RARE)) + ln(1/RARE) (Bernstein 1946). The count detects faults that are smaller than a rounding of bf16, such
as GELU by tanh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lockstep.core.parity.honest.function import EPS, spacing
from lockstep.core.parity.honest.measures import DEVIATIONS, ROOM, ROUNDING, ROUNDINGS, table_of
from lockstep.core.parity.measures.calibrated_bounds import FP64_LIMIT
from lockstep.core.parity.measures.distances import FLOOR_ULPS
from lockstep.core.parity.measures.verdict import Measure

RARE = 1e-9
# Number of random inputs near the given ones, and their relative change. The change is large enough to alter bf16
# numbers.
DRAWS, BESIDE = 4, 2.0**-10


@dataclass(frozen=True)
class Sides:
    """The result of an operation on three sides: candidate, truths and twins.

    candidate: float64 array of numbers that were computed in `dtype`.
    truths: the formula in FP64 at the given inputs, then at random inputs near them.
    twins: the formula in the candidate's arithmetic at the same inputs; empty if there is none.
    terms: how many numbers are summed into one.
    resolution: absolute error without effect, for a statistic that only another operation reads.
    """

    candidate: np.ndarray
    truths: Sequence[np.ndarray]
    twins: Sequence[np.ndarray]
    dtype: str
    terms: float
    resolution: float = 0.0
    finite: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        kept = np.isfinite(self.truths[0])
        for side in (*self.truths[1:], *self.twins):
            kept = kept & np.isfinite(side)
        object.__setattr__(self, "finite", kept)

    def of(self, x: np.ndarray) -> np.ndarray:
        """Return numbers as a table (rows, columns), with zero where a truth is not finite."""
        return np.where(self.finite, x, 0.0).reshape(table_of(x.shape))

    @cached_property
    def floor(self) -> np.ndarray:
        """The variance that no kernel can avoid, by element: (rows, columns) float64."""
        t = self.of(self.truths[0])
        one = np.square(spacing(t, self.dtype)) / 12 + np.square(FLOOR_ULPS * EPS["float32"] * t)
        moved = [np.square((self.of(x) - t) / BESIDE) for x in self.truths[1:]]
        response = sum(moved, np.zeros_like(t)) / max(len(moved), 1)
        if t.size < len(moved) ** 3:
            # The mean square of a few draws may be near zero by chance. Their maximum seldom is.
            response = np.max(moved, axis=0) if moved else response
        return self.resolution**2 + one + (ROUNDING * EPS["float32"]) ** 2 * self.terms / 2 * (np.square(t) + response)


def not_finite(sides: Sides) -> int:
    """Count numbers that are not finite on one side only, or differ.

    Overflow of the dtype is expected where the twin has it.
    """
    c, t = sides.candidate, (sides.twins or sides.truths)[0]
    with np.errstate(invalid="ignore"):
        same = (c == t) | (np.isnan(c) & np.isnan(t))
    return int(np.count_nonzero(~(np.isfinite(c) & np.isfinite(t)) & ~same))


def measured(sides: Sides, length: bool = True) -> tuple[Measure, ...]:
    """Measure a result of at least one number.

    length: measure the gain too. A kernel that rounds a statistic once a channel changes the length of the whole
    channel, so its gain is measured only if the twin rounds as the kernel does.
    """
    c, t = sides.of(sides.candidate), sides.of(sides.truths[0])
    bad = not_finite(sides)
    if bad:
        return (Measure("not_finite", float(bad), None, 0.0, "numbers are finite where the formula's are"),)
    if sides.dtype == "float64":
        return (_in_fp64(sides, c, t),)
    floor = sides.floor
    own = [np.square(sides.of(w) - sides.of(x)) for w, x in zip(sides.twins, sides.truths, strict=False)]
    honest = np.maximum(sum(own, np.zeros_like(t)) / max(len(own), 1), floor)
    squares = np.square(c - t)
    total = max(float(honest.sum()), float(np.finfo(np.float64).tiny))
    rows, columns = t.shape
    basis = f"{ROOM:g} ({ROUNDINGS} roundings for 1) × {{:.3g}} (the largest of {{}} norms of {{}} numbers)"
    found = [_norm("excess", math.sqrt(float(squares.sum()) / total), 1, t.size, basis)]
    if rows > 1 and columns > 1:
        for name, axis, of, numbers in (("row", 1, rows, columns), ("column", 0, columns, rows)):
            unit = np.maximum(honest.sum(axis), total / of)
            found.append(_norm(name, math.sqrt(float((squares.sum(axis) / unit).max())), of, numbers, basis))
    power = float(np.square(t).sum())
    if power > 0 and length:
        apart = c - (sides.of(sides.twins[0]) if sides.twins else t)
        by_element = math.sqrt(float((honest * np.square(t)).sum())) / power
        reach = DEVIATIONS * ROOM * math.hypot(by_element, FLOOR_ULPS * EPS["float32"])
        why = f"{ROOM:g} × {DEVIATIONS:g}σ of honest errors of length"
        found.append(Measure("gain", float((apart * t).sum()) / power, -reach, reach, why))
    return tuple(found)


def _norm(name: str, value: float, of: int, numbers: int, basis: str) -> Measure:
    reach = 1 + math.sqrt(2 * math.log(of / RARE) / numbers)
    return Measure(name, value, None, ROOM * reach, basis.format(reach, f"{of:,}", f"{numbers:,}"))


def _in_fp64(sides: Sides, c: np.ndarray, t: np.ndarray) -> Measure:
    """Compare two computations in FP64, relative to the truth, or to its response to inputs if terms cancel."""
    power = float(np.square(t).sum())
    for moved in sides.truths[1:]:
        power = max(power, float(np.square((sides.of(moved) - t) / BESIDE).sum()))
    off = math.sqrt(float(np.square(c - t).sum()))
    relative = off / math.sqrt(power) if power else (0.0 if not off else math.inf)
    return Measure("relative_error", relative, None, FP64_LIMIT, "two computations in FP64")


def unequal(c: np.ndarray, w: np.ndarray, before: np.ndarray, t: np.ndarray, dtype: str) -> Measure:
    """Count differences from the twin; the bound is the number of ties to expect.

    c, w: candidate and twin in `dtype`. before: the twin in FP32, not yet rounded. t: the truth. All are float64 arrays
    of one shape.
    """
    kept = np.isfinite(before) & np.isfinite(t) & (t != 0)
    c, w, before, t = (x[kept] for x in (c, w, before, t))
    off = np.abs(before - t) + FLOOR_ULPS * EPS["float32"] * np.abs(t)
    ties = float(np.minimum(1.0, 2 * ROOM * off / spacing(t, dtype)).sum())
    rare = math.log(1 / RARE)
    most = ties + math.sqrt(2 * ties * rare) + rare
    basis = f"{ties:.3g} of {t.size:,} numbers may lie at a tie of two computations in FP32, with a margin for chance"
    return Measure("unequal", float(np.count_nonzero(c != w)), None, most, basis)


def exact(candidate: np.ndarray, due: np.ndarray) -> Measure:
    """Count the numbers that differ, for an operation that only moves numbers or rounds each once.

    candidate, due: arrays of one shape. Two NaN are equal.
    """
    same = (candidate == due) | ((candidate != candidate) & (due != due))
    basis = "equal numbers: the operation only moves them, or rounds each once"
    return Measure("mismatches", float(np.count_nonzero(~same)), None, 0.0, basis)
