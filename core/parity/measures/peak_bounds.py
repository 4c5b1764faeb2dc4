"""Bounds on single elements, rows, columns and unequal bits, which the norm of a whole tensor hides.

The bounds apply if clean runs of a recipe were measured for them (`Sharp` in calibrated_bounds.json). From the
candidate's own inputs, the twin reproduces its results except for the order of FP32 sums. The least bounds below are
the effects of another order, so that a machine with other kernels does not break them:

* A result rounded to the operand dtype differs if its sum lies at a tie. One such element differs by a whole ulp, twice
  the largest error of a rounding (TIE). A share of about √K · 2⁻¹⁶ of the elements lies so near to a tie: 0.001 for
  4,096 terms; the least bound is ten times that. The share grows with the root of the number of terms, so ten times the
  odds allow for sums a hundred times as long (ODDS).
* A product of rounded operands that stays in FP32 differs by at most √K roundings of FP32: 64 · 2⁻²⁴ of a sum of 4,096
  terms. The operands' own rounding is 2⁻⁹, so the ratio is 0.002; KEPT is ten times that.
* For a result in FP32 throughout, the ratio of two honest errors reaches `LEAST_OF_SUMS`. The ratio of two largest
  elements, each from the tail of a distribution, reaches twice that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lockstep.core.parity.measures.distances import Distances
from lockstep.core.parity.measures.peaks import FEW
from lockstep.core.parity.measures.scatter import scatter
from lockstep.core.parity.measures.verdict import Measure

# The kinds of results: rounded to the operand dtype; a product of rounded operands that stays in FP32; FP32 throughout;
# the same number from two programs of the candidate.
Result = Literal["rounded", "kept", "sum", "same"]

TIE = 3.0
KEPT = 0.02
LEAST_OF_SUMS = 4.0
ODDS = 10.0
# A distance is about √share. If the share is ODDS times as large, the distance is √ODDS times as large.
REACH = 2 * math.sqrt(ODDS)
# Standard deviations of a count. Six correspond to a probability of one in a billion for a comparison (Bernstein's
# inequality, with z²/n for the tail of small counts).
DEVIATIONS = 6.0


@dataclass(frozen=True)
class Least:
    """The least bounds of one kind of result."""

    distance: float
    largest: float
    line: float  # a row or a column
    row_gain: float
    unequal: float


LEAST: dict[Result, Least] = {
    "rounded": Least(distance=0.3, largest=TIE, line=0.6, row_gain=0.05, unequal=0.01),
    "kept": Least(distance=KEPT, largest=KEPT, line=KEPT, row_gain=KEPT / 2, unequal=0.0),
    # No policy declares the order of FP32 sums, so all elements may differ.
    "sum": Least(LEAST_OF_SUMS, 2 * LEAST_OF_SUMS, LEAST_OF_SUMS, LEAST_OF_SUMS / 2, unequal=1.0),
    "same": Least(distance=0.3, largest=TIE, line=0.6, row_gain=0.05, unequal=0.0),
}


@dataclass(frozen=True)
class Sharp:
    """Extremes of clean runs: of the twin distance, of `Peaks`, and of the share of unequal elements.

    Each is in units of the scatter of its numbers; the share is that of `share_at_least`. draws: number of comparisons.
    """

    distance: float
    largest: float
    row: float
    column: float
    row_gain: float
    unequal: float
    draws: int

    @classmethod
    def of(cls, d: Distances, size: int) -> Sharp | None:
        """Return the extremes of one comparison; None for sketches."""
        if (peaks := d.peaks) is None:
            return None
        return cls(
            distance=d.twin_distance / scatter(size),
            largest=peaks.largest / scatter(size),
            row=peaks.row / scatter(peaks.columns),
            column=peaks.column / scatter(peaks.rows),
            row_gain=abs(peaks.row_gain) / scatter(size),
            unequal=share_at_least(d.unequal, size),
            draws=1,
        )

    def __or__(self, other: Sharp) -> Sharp:
        """Return the larger of each pair of extremes."""
        names = ("distance", "largest", "row", "column", "row_gain", "unequal")
        most = {name: max(getattr(self, name), getattr(other, name)) for name in names}
        return Sharp(**most, draws=self.draws + other.draws)


def share_at_least(share: float, size: int) -> float:
    """Return the smallest true share that is consistent with a sample's share: p − z·√(p·(1 − p)/n) − z²/n, or 0."""
    z = DEVIATIONS**2 / size
    return max(0.0, share - math.sqrt(z * share * (1 - share)) - z)


def share_at_most(share: float, size: int) -> float:
    """Return the largest share in a sample of n = `size` numbers for a true share p: p + z·√(p·(1 − p)/n) + z²/n."""
    z = DEVIATIONS**2 / size
    return share + math.sqrt(z * share * (1 - share)) + z


def distance_limit(clean: Sharp, result: Result) -> float:
    """Return a bound on a large tensor's twin distance. `calibrated_bounds` uses the narrower of two bounds."""
    return max(REACH * clean.distance, LEAST[result].distance)


def distance_of_ties(result: Result, d: Distances) -> float:
    """Return the distance that a few elements at a tie can cause, a whole ulp each; 0 if more elements differ.

    The largest difference of an element is d.peaks.largest in units of the twin's largest error, and TIE is allowed.
    """
    peaks = d.peaks
    if result != "rounded" or peaks is None or not peaks.largest:
        return 0.0
    count = round(d.unequal * peaks.rows * peaks.columns)
    return TIE * d.twin_distance / peaks.largest if count <= FEW else 0.0


def measures(clean: Sharp, result: Result, d: Distances, size: int, margin: float) -> Iterator[Measure]:
    """Yield the measures of this file with their bounds, if `d` has peaks.

    margin: factor on the extremes of clean runs.
    """
    if (peaks := d.peaks) is None:
        return
    least, width = LEAST[result], scatter(size)

    def bound(extreme: float, least: float, width: float) -> tuple[float, str]:
        high = max(margin * extreme, least)
        how = f"×{margin:g}" if high > least else f"least {least:g}"
        few = f", few numbers ×{width:.2g}" if width > 1.05 else ""
        return high * width, f"{clean.draws} clean draws reached {extreme:.3g}, {how}{few}"

    yield Measure("largest_element", peaks.largest, None, *bound(clean.largest, least.largest, width))
    if peaks.rows > 1 and peaks.columns > 1:
        of_many = (peaks.row_of_many, peaks.column_of_many) if result == "rounded" else (None, None)
        lines = (
            ("row", peaks.row, clean.row, peaks.columns, peaks.at_row, peaks.rows),
            ("column", peaks.column, clean.column, peaks.rows, peaks.at_column, peaks.columns),
        )
        for (name, value, extreme, numbers, at, count), many in zip(lines, of_many, strict=True):
            # An element at a tie may dominate its row and its column, but is bounded as an element.
            value = value if many is None else many
            high, basis = bound(extreme, least.line, scatter(numbers))
            where = f"; at index {at:,} of {count:,}" if value > high and at is not None else ""
            yield Measure(f"largest_{name}", value, None, high, basis + where)
        reach, basis = bound(clean.row_gain, least.row_gain, width)
        yield Measure("row_gain", peaks.row_gain, -reach, reach, basis)
    # The share with ODDS times the odds.
    more = max(ODDS * clean.unequal / (1 + (ODDS - 1) * clean.unequal), least.unequal)
    if (at_most := share_at_most(more, size)) < 1:
        how = f"least {least.unequal:g}" if more <= least.unequal else f"the odds ×{ODDS:g}"
        basis = f"{clean.draws} clean draws reached {clean.unequal:.3g}, {how}, {DEVIATIONS:g}σ of a count of {size:,}"
        yield Measure("unequal", d.unequal, None, at_most, basis)
