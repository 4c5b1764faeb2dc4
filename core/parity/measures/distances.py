"""Excess, gain and twin distance: how a candidate's error compares with that of an honest implementation.

With candidate c, twin w (the reference at the candidate's declared precision) and truth t (the reference at a far
higher precision)::

    excess          = ‖c − t‖ / ‖w − t‖          near 1 if honest; far below 1 if the declared precision is not in force
    gain difference = ⟨c, t⟩/⟨t, t⟩ − ⟨w, t⟩/⟨t, t⟩   detects errors of length that are too small to change the excess
    twin distance   = ‖c − w‖ / ‖w − t‖          small if an honest stage has its twin's bits

Norms are computed in FP64. Both error norms have a lower limit of a few ulp of the *stream* dtype. With this limit, a
stage that is exact on all sides (a table look-up) has excess 1 and distance 0, not 0/0. A limit of a few ulp of the
operand dtype would hide every fault in bf16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from lockstep.core.parity.measures.peaks import Norms, Peaks, PeakSums
from lockstep.core.parity.measures.stretches import Space, stretches, wide

# Each element of an honest FP32 stage differs from its FP64 truth by about half an ulp per operation. Errors below two
# ulp (of the norm) are differences of rounding between two correct implementations.
FLOOR_ULPS = 2.0
NO_NOISE = Norms()
# The lower limit if the truth is all zeros (the gradient of an unused row): the smallest normal number.
SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Distances:
    """The three measures, ‖c − t‖/‖t‖, the twin's ‖w − t‖/‖t‖ with its lower limit, and the share of unequal elements.

    peaks: the largest errors of elements, rows and columns; None for sketches, which do not resolve elements.
    """

    excess: float
    gain_difference: float
    twin_distance: float
    relative_error: float
    twin_relative_error: float
    unequal: float
    peaks: Peaks | None = None


@dataclass
class Sums:
    """The sums from which the distances of three arrays follow. Parts of the arrays are added in order.

    shape: shape of the whole tensor, whose elements are added in row-major order; None computes no peaks.
    of_candidate, of_twin, apart, power: sums of squares of c − t, w − t, c − w and t, in FP64.
    apart_along, error_along: sums of (c − w)·t and (c − t)·t, in FP64.
    fourth: sum of fourth powers of w − t, in FP64.
    unequal: count of elements in which c and w differ.
    size: count of elements.
    """

    shape: tuple[int, ...] | None = None
    of_candidate: float = 0.0
    of_twin: float = 0.0
    apart: float = 0.0
    power: float = 0.0
    apart_along: float = 0.0
    error_along: float = 0.0
    fourth: float = 0.0
    unequal: int = 0
    size: int = 0

    def __post_init__(self) -> None:
        self._peaks = PeakSums(self.shape) if self.shape is not None else None
        self._space = Space(5)

    def add(self, candidate: np.ndarray, twin: np.ndarray, truth: np.ndarray) -> None:
        """Add parts of one shape. Raises ValueError if their shapes differ."""
        if not (candidate.shape == twin.shape == truth.shape):
            raise ValueError(f"shapes differ: candidate {candidate.shape}, twin {twin.shape}, truth {truth.shape}")
        flat = candidate.reshape(-1), twin.reshape(-1), truth.reshape(-1)
        with np.errstate(invalid="ignore", over="ignore"):
            for where in stretches(candidate.size):
                self._add(*(x[where] for x in flat))

    def _add(self, candidate: np.ndarray, twin: np.ndarray, truth: np.ndarray) -> None:
        of_truth, of_twin, of_candidate, honest, apart = self._space.of(candidate.size)
        t, w = wide(truth, of_truth), wide(twin, of_twin)
        np.subtract(w, t, out=honest)
        power, along = float(honest @ honest), float(honest @ t)
        differ = int(np.count_nonzero(candidate != twin))
        if differ:
            c = wide(candidate, of_candidate)
            error = np.subtract(c, t, out=apart)
            self.of_candidate += float(error @ error)
            self.error_along += float(error @ t)
            np.subtract(c, w, out=apart)
            self.apart += float(apart @ apart)
            self.apart_along += float(apart @ t)
        else:  # usual if the twin gets the candidate's inputs: c − w is zero, and c − t is w − t
            self.of_candidate += power
            self.error_along += along
        self.unequal += differ
        self.size += candidate.size
        self.power += float(t @ t)
        self.of_twin += power
        squares = np.square(honest, out=honest)
        self.fourth += float(squares @ squares)
        if self._peaks is not None:
            self._peaks.add(apart if differ else None, squares, t)

    def distances(self, stream: type[np.floating], noise: Norms = NO_NOISE) -> Distances:
        """Compute the measures. stream: the dtype whose ulp sets the lower limit of error norms.

        noise: a higher lower limit, where the noise of the result is known.
        A number that is not finite makes every measure infinite. Raises ValueError if there is nothing to compare.
        """
        if not self.size:
            raise ValueError("nothing to compare: the arrays are empty")
        unequal = self.unequal / self.size
        if not math.isfinite(self.of_candidate + self.of_twin + self.apart + self.power):
            return Distances(np.inf, np.inf, np.inf, np.inf, np.inf, unequal)
        scale, of_candidate, of_twin, apart = map(math.sqrt, (self.power, self.of_candidate, self.of_twin, self.apart))
        d = _ratios(scale, of_candidate, of_twin, apart, self.apart_along, stream, unequal, noise.whole)
        if self._peaks is None:
            return d
        return replace(d, peaks=self._peaks.peaks(_floor(stream), SMALLEST, noise))

    def effective(self) -> int:
        """Estimate the number of independent errors that dominate the norm of e = w − t: 3·(Σe²)² / Σe⁴.

        The estimate is at most the count of numbers. The formula is the participation ratio times 3, the value for a
        normal distribution. If one row of a gradient outweighs the rest, its few roundings decide every ratio.
        """
        ratio = self.of_twin**2 / self.fourth if self.fourth else math.nan
        return min(self.size, 3 * max(1, round(ratio))) if math.isfinite(ratio) else self.size

    def along_the_truth(self) -> tuple[float, float]:
        """Return r = ⟨c, t⟩ / ⟨t, t⟩ and ‖c − r·t‖ / ‖t‖; NaN if the truth is zero or a number is not finite."""
        if not (self.power and math.isfinite(self.of_candidate + self.power)):
            return math.nan, math.nan
        more = self.error_along / self.power
        return 1.0 + more, math.sqrt(max(self.of_candidate / self.power - more**2, 0.0))


def distances(candidate: np.ndarray, twin: np.ndarray, truth: np.ndarray, stream: type[np.floating]) -> Distances:
    """Compare three whole arrays of one shape (`Sums.distances`). Raises ValueError as `Sums` does."""
    sums = Sums(truth.shape)
    sums.add(candidate, twin, truth)
    return sums.distances(stream)


def ratios(c: np.ndarray, w: np.ndarray, t: np.ndarray, stream: type[np.floating], unequal: float) -> Distances:
    """Compute the measures of three float64 vectors, which are sketches."""
    scale, of_candidate, of_twin, apart = (float(np.linalg.norm(x)) for x in (t, c - t, w - t, c - w))
    return _ratios(scale, of_candidate, of_twin, apart, float((c - w) @ t), stream, unequal, 0.0)


def _floor(stream: type[np.floating]) -> float:
    return FLOOR_ULPS * float(np.finfo(stream).eps)


def _ratios(
    scale: float,
    of_candidate: float,
    of_twin: float,
    apart: float,
    apart_along: float,
    stream: type[np.floating],
    unequal: float,
    noise: float,
) -> Distances:
    """Compute the measures from ‖t‖, ‖c − t‖, ‖w − t‖, ‖c − w‖ and ⟨c − w, t⟩."""
    floor = max(_floor(stream) * scale, SMALLEST, noise)
    honest = max(of_twin, floor)
    return Distances(
        excess=max(of_candidate, floor) / honest,
        gain_difference=apart_along / scale**2 if scale else 0.0,
        twin_distance=apart / honest,
        relative_error=of_candidate / scale if scale else (0.0 if of_candidate == 0 else np.inf),
        twin_relative_error=honest / scale if scale else np.inf,
        unequal=unequal,
    )
