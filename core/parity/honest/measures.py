"""Excess, gain, distance and peaks of one result over all draws, with bounds from the draws of the plain function.

With candidate c, twin w (the plain function at the dtype), truth t (the plain function in FP64) and draws k, the unit
of every measure is the twin's own error. Its lower limit is the error that no kernel can avoid::

    rounding      ulp(t)²/12, the variance of one rounding of the result to its dtype, and (2 ulp of FP32 · t)²
    summation     ρ²·(n/2)·(t² + κ²), the variance of n FP32 additions in sequence

n is the count of numbers of one input, or of one output's gradient, on which a number of the result depends, and is
found by changing one number of each. κ is the response of the result to independent relative changes of all inputs. ρ =
0.21 ulp is the root mean square of one rounding. For n terms of size τ, κ = √n·τ. If signs differ, a partial sum of k
terms has the size √k·τ, and the variance of the roundings is ρ²·n²·τ²/2 = ρ²·(n/2)·κ². If all have one sign, its size
is k·τ, and the variance is ρ²·n³·τ²/3 = ρ²·(n/3)·t². Other orders of summation have smaller errors::

    excess   √(Σ_k ‖c − t‖² / Σ_k ‖w − t‖²)
    lengths  the same for the components of the errors along the truth, row by row: Σ_r ⟨c − t, t⟩_r² / ‖t‖_r²
    row      max over rows r of √(Σ_k ‖c − t‖_r² / max(Σ_k ‖w − t‖_r², mean over rows of the same)); column likewise
    largest  max over elements and draws of |c − t| / u, in units of the twin's; u² from the twin's rows and columns
    gain     ⟨c − w, t⟩ / ⟨t, t⟩

A row is along the last axis. An operation that rounds once a row, such as the reciprocal norm or the sum of a softmax,
changes the length of the whole row. Only `lengths` shows this error, which is small compared with the roundings of all
elements of the row.

**Bounds.** Each draw of the twin is measured against the other draws as if it came from a kernel. The largest result,
and at least 1, is the effect of chance. A bound is this value, times ROOM, times MARGIN to the power of the scatter of
few numbers. ROOM: a kernel may round at ROUNDINGS places where the plain function rounds at one. For example, flash
attention's gradient of k has four: the output of which its row sums are made, the weights, their gradient, the result.
Variances add, hence √4. FlashAttention's own tests also allow twice the plain error. For `largest`, chance is the ratio
of the largest draw to the median draw, because where few elements have most of the error, another kernel's error may
exceed its median as much. The largest of n single roundings is half an ulp. For sums of several roundings it is nearer
to that of n normal numbers, √(2·ln(n/RARE)), so its bound is at least ROOM times that. There is no lower bound, so a
more accurate kernel passes. Errors relative to t are bounded, not those relative to w: end to end, a kernel and its
twin round independently, and each is only as near to the truth as its roundings allow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lockstep.core.parity.honest.function import EPS, spacing
from lockstep.core.parity.measures.distances import FLOOR_ULPS, Distances, Sums
from lockstep.core.parity.measures.peaks import Norms
from lockstep.core.parity.measures.scatter import scatter
from lockstep.core.parity.measures.verdict import Measure

ROUNDINGS = 4
ROOM = math.sqrt(ROUNDINGS)
# Bound on the ratio of two honest errors of many numbers, over several comparisons at once.
MARGIN = 1.1
# Probability that the largest of n normal numbers exceeds its bound.
RARE = 1e-6
# Standard deviations of a length's honest error.
DEVIATIONS = 6.0
# Root mean square of a rounding, relative to the number, in ulp at 1: √(∫ m⁻³ dm / ln 2 / 12) over a binade.
ROUNDING = math.sqrt(3 / 8 / math.log(2) / 12)
# Ratio of the largest error of one rounding to its root mean square: half an ulp over ulp/√12.
LARGEST_ROUNDING = math.sqrt(3.0)

GIVEN = "given by bounds="
NAMES = ("excess", "largest", "lengths", "row", "column", "gain")


@dataclass(frozen=True)
class Sides:
    """A result on every draw, as finite numbers of one shape.

    candidate, twin, truth: one array a draw.
    dtype: dtype of the twin's result.
    response: mean square of the truth's response to relative changes, by element.
    terms: n of this module.
    """

    candidate: Sequence[np.ndarray]
    twin: Sequence[np.ndarray]
    truth: Sequence[np.ndarray]
    dtype: str
    response: np.ndarray
    terms: float


@dataclass(frozen=True)
class Measured:
    """Measures with their bounds, and distances over all draws.

    worst, draw: index and draw of the candidate's largest error.
    own: the twin's error, relative to the truth.
    ratio, residual: as in `Sums.along_the_truth`.
    """

    measures: tuple[Measure, ...]
    distances: Distances
    worst: tuple[int, ...]
    draw: int
    own: float
    ratio: float
    residual: float


class Units:
    """The unit of each element, row and column: the twin's error there, from the squares of some draws."""

    def __init__(self, squares: np.ndarray, floor: np.ndarray) -> None:
        """Compute the units from mean squares over draws and their lower limit, both (rows, columns)."""
        self.rows = np.maximum(squares.sum(1), floor.sum(1))
        self.columns = np.maximum(squares.sum(0), floor.sum(0))
        self.total = max(float(squares.sum()), float(floor.sum()), np.finfo(np.float64).tiny)
        mean = self.total / squares.size
        self.elements = np.maximum(self.rows[:, None] * self.columns[None] / self.total, mean)

    def excess(self, squares: np.ndarray) -> float:
        """Return the excess from mean squares of errors (rows, columns)."""
        return math.sqrt(float(squares.sum()) / self.total)

    def lines(self, squares: np.ndarray, axis: int) -> np.ndarray:
        """Return the norms by row (axis 1 is summed) or by column, in units of the line's own or of the mean line's."""
        own = self.rows if axis == 1 else self.columns
        return np.sqrt(squares.sum(axis) / np.maximum(own, self.total / len(own)))

    def shares(self, squares: np.ndarray, floor: np.ndarray) -> np.ndarray:
        """Return squared errors of one draw, (rows, columns), in units of each element or of the draw's lower limit."""
        return squares / np.maximum(self.elements, floor)


def floor_of(sides: Sides, draw: int) -> np.ndarray:
    """Return the variance that no kernel can avoid, by element, on one draw: (rows, columns)."""
    t = sides.truth[draw]
    dtype = sides.dtype if sides.dtype != "float64" else "float32"
    one_rounding = np.square(spacing(t, dtype)) / 12 + np.square(FLOOR_ULPS * EPS["float32"] * t)
    summed = (ROUNDING * EPS["float32"]) ** 2 * sides.terms / 2
    return (one_rounding + summed * (np.square(t) + sides.response)).reshape(table_of(t.shape))


def table_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, columns): all axes but the last as rows, the last as columns."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


class Errors:
    """Errors of one side on every draw, as tables of squares, and their components along the truth by row."""

    def __init__(self, side: Sequence[np.ndarray], truth: Sequence[np.ndarray], table: tuple[int, int]) -> None:
        self._pairs, self._table = list(zip(side, truth, strict=True)), table
        self.mean = sum((self.squares(k) for k in range(len(self._pairs))), np.zeros(table)) / len(self._pairs)
        self.along = [self._along(k) for k in range(len(self._pairs))]

    def squares(self, draw: int) -> np.ndarray:
        """Return the squares of one draw's errors, (rows, columns)."""
        x, t = self._pairs[draw]
        return np.square(x - t).reshape(self._table)

    def _along(self, draw: int) -> float:
        x, t = (one.reshape(self._table) for one in self._pairs[draw])
        power = np.square(t).sum(1)
        parts = np.square(((x - t) * t).sum(1)) / np.where(power > 0, power, 1.0)
        return float(parts.sum())


@dataclass
class Honest:
    """The largest values of single draws of the twin against the others.

    reached: measure → value. For `largest`, the ratio of the largest draw to the median one.
    largest: the largest draw, in units of the elements.
    along: squares of the twin's errors along the truth.
    """

    reached: dict[str, float]
    largest: float
    along: float

    @classmethod
    def of(cls, twin: Errors, floors: Callable[[int], np.ndarray], floor: np.ndarray, along_floor: float) -> Honest:
        """Measure each draw of the twin against the others. floors: lower limits by draw. floor: their mean."""
        count = len(twin.along)
        reached, largest = dict.fromkeys(NAMES, 1.0), list[float]()
        along = max(sum(twin.along) / count, along_floor, np.finfo(np.float64).tiny)
        for k in range(count):
            own = twin.squares(k)
            others = Units(np.maximum(twin.mean * count - own, 0.0) / (count - 1), floor)
            of_others = max((sum(twin.along) - twin.along[k]) / (count - 1), along_floor, np.finfo(np.float64).tiny)
            found = {
                "excess": others.excess(own),
                "lengths": math.sqrt(twin.along[k] / of_others),
                "row": float(others.lines(own, 1).max()),
                "column": float(others.lines(own, 0).max()),
            }
            reached |= {name: max(reached[name], value) for name, value in found.items()}
            largest.append(max(LARGEST_ROUNDING, math.sqrt(float(others.shares(own, floors(k)).max()))))
        reached["largest"] = max(largest) / float(np.median(largest))
        return cls(reached, max(largest), along)


def measure(sides: Sides, given: Mapping[str, float], reason: str) -> Measured:
    """Measure one result on at least two draws. given: bounds of the user by name. reason: their reason."""
    shape = sides.truth[0].shape
    rows, columns = table = table_of(shape)
    count = len(sides.truth)
    floors = partial(floor_of, sides)
    floor = sum((floors(k) for k in range(count)), np.zeros(table)) / count
    twin, candidate = (Errors(side, sides.truth, table) for side in (sides.twin, sides.candidate))
    units = Units(twin.mean, floor)
    variance = np.maximum(twin.mean, floor)
    honest = Honest.of(twin, floors, floor, _along_by_chance(variance, sides.truth[0].reshape(table)))
    peaks = [units.shares(candidate.squares(k), floors(k)) for k in range(count)]
    worst = int(np.argmax([peak.max() for peak in peaks]))
    largest = math.sqrt(float(peaks[worst].max()))
    sums = Sums()
    for c, w, t in zip(sides.candidate, sides.twin, sides.truth, strict=True):
        sums.add(c, w, t)
    d = sums.distances(np.float32, Norms(whole=math.sqrt(count * float(floor.sum()))))
    effective = min(variance.size, round(_participating(variance) * (1 + 2 / count)))
    values = {"excess": (d.excess, effective), "largest": (largest / honest.largest, effective)}
    where = {}
    if rows > 1 and columns > 1:
        values["lengths"] = math.sqrt(sum(candidate.along) / count / honest.along), min(rows, effective)
        for name, axis, numbers in (("row", 1, columns), ("column", 0, rows)):
            line = units.lines(candidate.mean, axis)
            values[name] = float(line.max()), numbers
            where[name] = f"; at index {int(line.argmax()):,} of {len(line):,}"
    found = []
    for name, (value, numbers) in values.items():
        width = MARGIN ** scatter(max(1, numbers))
        reached, of = honest.reached[name], f"{count} draws of plain"
        if (
            name == "largest"
            and (normal := math.sqrt(2 * math.log(floor.size * count / RARE)) / honest.largest) > reached
        ):
            reached, of = normal, f"{floor.size * count:,} normal numbers"
        basis = f"{ROOM:g} ({ROUNDINGS} roundings for 1) × {reached:.3g} ({of}) × {width:.3g} (few numbers)"
        found.append(Measure(name, value, None, ROOM * reached * width, basis + where.get(name, "")))
    reach, basis = _reach(sides, variance)
    found.append(Measure("gain", d.gain_difference, -reach, reach, basis))
    index = np.unravel_index(int(peaks[worst].argmax()), shape) if shape else ()
    ratio, residual = sums.along_the_truth()
    power = math.sqrt(sums.power)
    return Measured(
        tuple(_given(m, given, reason) for m in found),
        d,
        tuple(int(i) for i in index),
        worst,
        math.sqrt(sums.of_twin) / power if power else (math.inf if sums.of_twin else 0.0),
        ratio,
        residual,
    )


def _given(m: Measure, bounds: Mapping[str, float], reason: str) -> Measure:
    if m.name not in bounds:
        return m
    low = -bounds[m.name] if m.low is not None else None
    return Measure(m.name, m.value, low, bounds[m.name], f"{GIVEN}: {reason}")


def _along_by_chance(variance: np.ndarray, truth: np.ndarray) -> float:
    """Return the component along the truth, row by row, of independent errors: Σ_r Σ v·t² / Σ t²."""
    squares = np.square(truth)
    power = squares.sum(1)
    return float(((variance * squares).sum(1) / np.where(power > 0, power, 1.0)).sum())


def _participating(variance: np.ndarray) -> float:
    """Estimate the number of elements with most of the error: (Σv)² / Σv²."""
    scale = float(variance.max(initial=0.0))
    if not scale:
        return variance.size
    share = variance / scale
    return float(share.sum()) ** 2 / float(np.square(share).sum())


def _reach(sides: Sides, variance: np.ndarray) -> tuple[float, str]:
    """Return the bound on the gain and its basis, from the twin's gains by draw and its elements' errors."""
    t = sides.truth[0].reshape(variance.shape)
    power = float(np.square(t).sum())
    if not power:
        return math.inf, "the truth is zero, so there is no gain"
    gains = [
        float(((w - x) * x).sum()) / p
        for w, x in zip(sides.twin, sides.truth, strict=True)
        if (p := float((x * x).sum()))
    ]
    by_draw = math.sqrt(sum(g * g for g in gains) / len(gains))
    by_element = math.sqrt(float((variance * np.square(t)).sum())) / power
    unit = math.hypot(by_draw, by_element, FLOOR_ULPS * EPS["float32"])
    basis = (
        f"{ROOM:g} ({ROUNDINGS} roundings for 1) × {DEVIATIONS:g}σ of {unit:.2g} (plain's gain by draw {by_draw:.1g}, "
        f"by element {by_element:.1g})"
    )
    return DEVIATIONS * ROOM * unit, basis
