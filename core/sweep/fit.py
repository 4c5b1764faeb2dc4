"""The optimum of loss against learning rate: a parabola in ln lr, and the interval of its minimum.

The loss is fitted by least squares as

    loss = a + b·x + c·x² + Σ d_j·z_j,   x = ln lr − mean

with a constant z_j for each further value of each other setting that is a list, and a slope for each that is a range.
Trials take part whose rate is within a factor FACTOR of the best trial's, or the nearest ones if those are too few: far
from its minimum the loss is no parabola. The minimum is x* = −b / 2c. Its 95 % interval is Fieller's (1954): the set of
all x at which the slope b + 2cx does not differ from 0,

    (b + 2cx)² ≤ t² · (V_bb + 4x·V_bc + 4x²·V_cc)

with V the covariance of the estimates and t Student's quantile. It is bounded only if the curvature itself differs from
0; otherwise it is shown as one without bounds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.core.sweep.space import Point, Varied

FACTOR = 8.0
# Degrees of freedom that a fit leaves at least.
FREE = 2
# The logarithm of the largest number; its negative is that of about the smallest.
_MOST_LOG = math.log(sys.float_info.max)
# Student's t, 97.5 %, by degrees of freedom from 1.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_Z = 1.959964


@dataclass(frozen=True)
class Optimum:
    """The learning rate of the least loss, by one width's trials.

    best: learning rate of the best trial. edge: `low` or `high` if that is the end of the rates that were tried, or the
    fitted one lies beyond it; else empty. rate: the fitted one, None if there is none. low, high: its 95 % interval,
    None if it is unbounded. used, of: trials in the fit, and in all. why: what stands in the way of a fit. curve:
    (rate, loss) of the parabola over the rates in the fit, the other settings as in the best trial.
    """

    best: float
    edge: str
    used: int
    of: int
    rate: float | None = None
    low: float | None = None
    high: float | None = None
    why: str = ""
    curve: Sequence[tuple[float, float]] = ()


def optimum(rows: Sequence[tuple[Point, float]], key: str, varied: Sequence[Varied]) -> Optimum | None:
    """Fit the loss of trials against the setting `key`, whose values are above 0.

    rows: settings and loss of each trial that may count. Returns None if no trial has a value there.
    """
    rows = [(point, loss) for point, loss in rows if float(point[key]) > 0 and math.isfinite(loss)]
    if not rows:
        return None
    rates = [float(point[key]) for point, _ in rows]
    best = min(zip((loss for _, loss in rows), rates, strict=True))[1]
    edge = _edge(best, rates)
    far = [abs(math.log(rate) - math.log(best)) for rate in rates]
    near = sorted(range(len(rows)), key=lambda i: (far[i], i))
    others = [one for one in varied if one.key != key]
    width = 3 + sum(_columns(one, [point for point, _ in rows]) for one in others)
    chosen = [i for i in near if far[i] <= math.log(FACTOR) + 1e-12]
    if len(chosen) < width + FREE:
        chosen = near[: width + FREE]
    if len(chosen) < width + FREE or len({rates[i] for i in chosen}) < 4:
        few = f"a fit needs {width + FREE} trials at four rates or more, and there are {len(rows)} that ended"
        return Optimum(best, edge, 0, len(rows), why=few)
    return _fit([rows[i] for i in sorted(chosen)], key, others, best, edge, rates)


def _edge(rate: float, rates: Sequence[float]) -> str:
    if len(set(rates)) < 2:
        return ""
    return "low" if rate <= min(rates) else "high" if rate >= max(rates) else ""


def _columns(one: Varied, points: Sequence[Point]) -> int:
    return 1 if one.is_range else len({point[one.key] for point in points}) - 1


def _fit(
    rows: Sequence[tuple[Point, float]],
    key: str,
    others: Sequence[Varied],
    best: float,
    edge: str,
    rates: Sequence[float],
) -> Optimum:
    points, losses = [point for point, _ in rows], np.array([loss for _, loss in rows], float)
    logs = np.log([float(point[key]) for point in points])
    middle = float(logs.mean())
    x = logs - middle
    columns = [np.ones_like(x), x, x**2, *(column for one in others for column in _design(one, points))]
    design = np.stack(columns, axis=1)
    used, of = len(rows), len(rates)
    free = used - int(np.linalg.matrix_rank(design))
    if np.linalg.matrix_rank(design) < design.shape[1] or free < FREE:
        return Optimum(best, edge, used, of, why="the other settings do not vary independently of the learning rate")
    solution, *_ = np.linalg.lstsq(design, losses, rcond=None)
    residual = losses - design @ solution
    variance = float(residual @ residual) / free
    covariance = variance * np.linalg.inv(design.T @ design)
    b, c = float(solution[1]), float(solution[2])
    if c <= 0:
        return Optimum(best, edge, used, of, why="the loss has no minimum there: it is not curved upwards")
    at = -b / (2 * c)
    low, high = _fieller(b, c, covariance[1:3, 1:3], quantile(free))
    # By logarithms: the minimum of a parabola that is hardly curved may lie beyond all numbers.
    lowest, highest, room = math.log(min(rates)), math.log(max(rates)), math.log(FACTOR)
    beyond = "low" if at + middle < lowest else "high" if at + middle > highest else ""
    # Far outside of what was tried a parabola gives the side on which to search, and no rate.
    known = lowest - room <= at + middle <= highest + room
    constant = float(np.mean(losses - b * x - c * x**2))
    return Optimum(
        best,
        beyond or edge,
        used,
        of,
        _rate(at, middle) if known else None,
        _rate(low, middle),
        _rate(high, middle),
        "" if known else "the fitted minimum lies far outside the rates that were tried",
        [(math.exp(t + middle), constant + b * t + c * t * t) for t in np.linspace(x.min(), x.max(), 60)],
    )


def _rate(at: float | None, middle: float) -> float | None:
    return None if at is None or abs(at + middle) > _MOST_LOG else math.exp(at + middle)


def _design(one: Varied, points: Sequence[Point]) -> list[NDArray[np.float64]]:
    if one.is_range:
        values = np.array([float(point[one.key]) for point in points])
        values = np.log(values) if one.log else values
        spread = float(values.std()) or 1.0
        return [(values - values.mean()) / spread]
    there = sorted({point[one.key] for point in points})
    return [np.array([float(point[one.key] == choice) for point in points]) for choice in there[1:]]


def _fieller(b: float, c: float, covariance: NDArray[np.float64], t: float) -> tuple[float | None, float | None]:
    """Return the ends of the interval of −b / 2c; both None if it is not bounded."""
    (of_b, shared), (_, of_c) = covariance.tolist()
    curvature = c * c - t * t * of_c
    if curvature <= 0:
        return None, None
    # The quadratic's discriminant over 16t², in which b²c² has been cancelled. It is not negative, because −b / 2c lies
    # in the interval. With b²c², only rounding errors would remain of it for trials that lie on a parabola.
    discriminant = b * b * of_c - 2 * b * c * shared + c * c * of_b - t * t * (of_b * of_c - shared * shared)
    middle, reach = t * t * shared - b * c, t * math.sqrt(max(0.0, discriminant))
    return (middle - reach) / (2 * curvature), (middle + reach) / (2 * curvature)


def quantile(free: int) -> float:
    """Return Student's t at 97.5 % for `free` degrees of freedom (above 30 by Cornish and Fisher's first terms)."""
    if free <= len(_T):
        return _T[free - 1]
    z = _Z
    return z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)


def by_width(rates: Mapping[int, Optimum]) -> list[tuple[int, float, float | None, float | None, bool]]:
    """Return width, rate, its interval and whether it was fitted, of each width; without a fit, the best trial's."""
    return [
        (width, one.rate, one.low, one.high, True) if one.rate is not None else (width, one.best, None, None, False)
        for width, one in sorted(rates.items())
    ]
