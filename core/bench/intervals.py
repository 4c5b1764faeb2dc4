"""Medians and ratios of measurements made in turns, with their 95 % intervals by bootstrap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_DRAWS = 2000


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median."""
    low, high = np.quantile(_medians(np.array(values, float)), [0.025, 0.975])
    return float(low), float(high)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Divide their seconds by ours, round by round: the median, and its interval over the rounds."""
    each = np.array(theirs, float) / np.array(ours, float)
    low, high = np.quantile(_medians(each), [0.025, 0.975])
    return {"median": float(np.median(each)), "low": float(low), "high": float(high)}


def _medians(each: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the medians of draws with replacement."""
    chosen = np.random.default_rng(0).integers(0, len(each), (_DRAWS, len(each)))
    return np.asarray(np.median(each[chosen], axis=1))
