"""Geometric means of excess over the checks of a run.

The errors of one step scatter. Their mean over many tensors hardly does. A candidate that shows only gradients and NLL
is judged end to end, where the ratio of errors of one tensor has little power: its bound is five times the extreme of
clean runs. The mean over all parameters scatters a tenth as much, and the mean of those means over checks a third of
that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from lockstep.core.parity.measures import calibrated_bounds
from lockstep.core.parity.measures.verdict import OVER_ALL, Finding

# The fewest checks in a mean, as in the measured clean runs.
LEAST_CHECKS = 5


def geometric_mean(excesses: list[float]) -> float:
    """Return the geometric mean of ratios. A ratio of zero counts as 1e-300."""
    return math.exp(math.fsum(math.log(max(e, 1e-300)) for e in excesses) / len(excesses))


@dataclass
class _Mean:
    """The mean excess of one kind of comparison.

    finding: the last comparison; None before the first one after a resume.
    logarithms: logarithm of the excess in each check.
    size: count of independent errors in all comparisons together.
    """

    finding: Finding | None = None
    logarithms: list[float] = field(default_factory=list)
    size: int = 0


@dataclass
class Means:
    """Means of the excesses of a run, by kind of comparison."""

    recipe: str
    _means: dict[str, _Mean] = field(default_factory=dict)

    def add(self, found: Finding, kind: str, size: int) -> None:
        """Add a comparison from one check, with about `size` independent errors. A broken one is left out."""
        excess = next((m.value for m in found.measures if m.name == "excess"), 0.0)
        if not (found.ok and 0 < excess < math.inf):
            return
        mean = self._means.setdefault(kind, _Mean())
        mean.finding, mean.size = found, mean.size + size
        mean.logarithms.append(math.log(excess))

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each mean over enough checks, if clean runs set a bound for it."""
        for kind, mean in self._means.items():
            checks = len(mean.logarithms)
            if checks < LEAST_CHECKS or mean.finding is None:
                continue
            excess = math.exp(math.fsum(mean.logarithms) / checks)
            measure = calibrated_bounds.mean_over_checks(self.recipe, kind, excess, mean.size, checks)
            if measure is not None:
                named = replace(mean.finding, tap=OVER_ALL, scope="over_steps", unequal=None, note="")
                yield replace(named, measures=(measure,))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the state as arrays for one npz file. `from_arrays` is the inverse."""
        means = list(self._means.values())
        return {
            "mean_kinds": np.asarray(list(self._means), np.str_),
            "mean_sizes": np.asarray([mean.size for mean in means], np.int64),
            "mean_checks": np.asarray([len(mean.logarithms) for mean in means], np.int64),
            "mean_logarithms": np.asarray([x for mean in means for x in mean.logarithms], np.float64),
        }

    @classmethod
    def from_arrays(cls, recipe: str, arrays: Mapping[str, np.ndarray]) -> Means:
        """Rebuild the means from `to_arrays`. Raises KeyError, TypeError or ValueError if the arrays are incomplete."""
        kinds, sizes, counts = (arrays[f"mean_{name}"].tolist() for name in ("kinds", "sizes", "checks"))
        logarithms = arrays["mean_logarithms"].tolist()
        if len(logarithms) != sum(counts) or min(counts, default=1) < 1 or not all(map(math.isfinite, logarithms)):
            raise ValueError("the counts of the means do not fit their numbers")
        means = cls(recipe)
        for kind, size, count in zip(kinds, sizes, counts, strict=True):
            means._means[kind] = _Mean(None, logarithms[:count], size)
            del logarithms[:count]
        return means
