"""Measures of one operation's result against its formula on the same inputs, and their bounds.

With result c, truth t (the formula in FP64) and twin w (the formula in FP32, rounded to the dtype of c), the unit of
each measure is the honest error: the twin's, floored by what no kernel can do without (`Sides.floor`)::

    rounding      ulp(t)²/12, the variance of one rounding to the dtype of c, and (2 ulp of FP32 · t)²
    summation     ρ²·(n/2)·(t² + κ²), the variance of n FP32 additions (core/parity/honest/measures.py)

    excess        ‖c − t‖ in honest errors
    row, column   the largest ‖c − t‖ of a row, in honest errors of that row, or of the mean row where those are larger
    gain          ⟨c − w, t⟩ / ⟨t, t⟩; without a twin, ⟨c − t, t⟩ / ⟨t, t⟩
    unequal       numbers in which c and w differ, of operations that compute in FP32 and round each number once

A kernel may round at ROUNDINGS places where the formula rounds at one, so its error may be ROOM times as large. The
norm of m independent normal errors of unit variance is below √m + √(2·ln(1/p)) but with probability p (Laurent and
Massart 2000, lemma 1), so of R rows the largest is within 1 + √(2·ln(R/RARE)/m) of its unit. RARE is for the thousands
of comparisons of a check. κ, the response to relative changes of the inputs, is zero at first. A result that breaks a
bound is judged again with κ, and with twins on inputs beside the given ones: no norm is accused on one draw.

Two computations in FP32, each off by e, round to different neighbours with a probability of at most 2·ROOM·e / ulp(t).
With λ the sum of these over all numbers, k differ, k ≤ λ + √(2·λ·ln(1/RARE)) + ln(1/RARE) (Bernstein 1946). So a fault
below the rounding of bf16, as GELU by tanh is, is seen in the bits.
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
# Number of draws near the given inputs, and their relative change: coarse enough to change numbers of bf16.
DRAWS, BESIDE = 4, 2.0**-10


@dataclass(frozen=True)
class Sides:
    """A result of an operation, by candidate, truths and twins.

    candidate: float64, as computed in `dtype`. truths: of the given inputs, and of draws beside them. twins: of the
    same draws; empty where there is no twin. terms: numbers that are summed into one. resolution: an absolute error
    that makes nothing worse, of a statistic that another operation reads.
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
        """Return numbers as a table, zero where a truth is not finite."""
        return np.where(self.finite, x, 0.0).reshape(table_of(x.shape))

    @cached_property
    def floor(self) -> np.ndarray:
        """The variance that a kernel cannot do without, by element."""
        t = self.of(self.truths[0])
        one = np.square(spacing(t, self.dtype)) / 12 + np.square(FLOOR_ULPS * EPS["float32"] * t)
        moved = [np.square((self.of(x) - t) / BESIDE) for x in self.truths[1:]]
        response = sum(moved, np.zeros_like(t)) / max(len(moved), 1)
        if t.size < len(moved) ** 3:
            # With few numbers, the mean of the squares may be near zero by chance; the largest seldom is.
            response = np.max(moved, axis=0) if moved else response
        return self.resolution**2 + one + (ROUNDING * EPS["float32"]) ** 2 * self.terms / 2 * (np.square(t) + response)


def not_finite(sides: Sides) -> int:
    """Count numbers that are not finite on one side alone, or not the same; overflow of the dtype is the twin's too."""
    c, t = sides.candidate, (sides.twins or sides.truths)[0]
    with np.errstate(invalid="ignore"):
        same = (c == t) | (np.isnan(c) & np.isnan(t))
    return int(np.count_nonzero(~(np.isfinite(c) & np.isfinite(t)) & ~same))


def measured(sides: Sides, length: bool = True) -> tuple[Measure, ...]:
    """Measure a result of at least one number.

    length: judge its gain too. A kernel that rounds a statistic once a channel makes a channel longer as a whole, so it
    is judged only where the twin rounds as the kernel does.
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
    """Compare two computations in FP64, relative to the truth and to its response where terms cancel."""
    power = float(np.square(t).sum())
    for moved in sides.truths[1:]:
        power = max(power, float(np.square((sides.of(moved) - t) / BESIDE).sum()))
    off = math.sqrt(float(np.square(c - t).sum()))
    relative = off / math.sqrt(power) if power else (0.0 if not off else math.inf)
    return Measure("relative_error", relative, None, FP64_LIMIT, "two computations in FP64")


def unequal(c: np.ndarray, w: np.ndarray, before: np.ndarray, t: np.ndarray, dtype: str) -> Measure:
    """Count numbers unlike the twin's against those that lie at a tie. before: the twin in FP32, not yet rounded."""
    kept = np.isfinite(before) & np.isfinite(t) & (t != 0)
    c, w, before, t = (x[kept] for x in (c, w, before, t))
    off = np.abs(before - t) + FLOOR_ULPS * EPS["float32"] * np.abs(t)
    ties = float(np.minimum(1.0, 2 * ROOM * off / spacing(t, dtype)).sum())
    rare = math.log(1 / RARE)
    most = ties + math.sqrt(2 * ties * rare) + rare
    basis = f"{ties:.3g} of {t.size:,} numbers lie at a tie between two computations in FP32, and chance"
    return Measure("unequal", float(np.count_nonzero(c != w)), None, most, basis)


def exact(candidate: np.ndarray, due: np.ndarray) -> Measure:
    """Count the numbers that differ, where numbers are only moved, or rounded once."""
    same = (candidate == due) | ((candidate != candidate) & (due != due))
    return Measure("mismatches", float(np.count_nonzero(~same)), None, 0.0, "numbers are moved, or rounded once: equal")
