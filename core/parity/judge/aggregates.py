"""Geometric means of excess over the checks of a run: a step's errors scatter, their mean over many tensors hardly.

A candidate that shows gradients and NLL alone is judged end to end, where one tensor's ratio of errors shows little:
its bound is five times the extreme of clean runs. The mean over all parameters scatters by a tenth of that, and the
mean of those over checks by a third of it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from lockstep.core.parity.measures import calibrated_bounds
from lockstep.core.parity.measures.verdict import OVER_ALL, Finding

# A mean is taken over at least this many checks, as in the clean runs that were measured.
LEAST_CHECKS = 5


def geometric_mean(excesses: list[float]) -> float:
    """Return the geometric mean of ratios; one of zero counts as 1e-300."""
    return math.exp(math.fsum(math.log(max(e, 1e-300)) for e in excesses) / len(excesses))


@dataclass
class _Mean:
    """The mean of a kind's excess.

    finding: the last comparison; None before the first one after a resume. size: of all of them.
    """

    finding: Finding | None = None
    logarithms: list[float] = field(default_factory=list)
    size: int = 0


@dataclass
class Means:
    """Means of a run's excesses, by kind of comparison."""

    recipe: str
    _means: dict[str, _Mean] = field(default_factory=dict)

    def add(self, found: Finding, kind: str, size: int) -> None:
        """Add a comparison of one check, of about `size` independent errors, that holds by itself."""
        excess = next((m.value for m in found.measures if m.name == "excess"), 0.0)
        if not (found.ok and 0 < excess < math.inf):
            return
        mean = self._means.setdefault(kind, _Mean())
        mean.finding, mean.size = found, mean.size + size
        mean.logarithms.append(math.log(excess))

    def findings(self) -> Iterator[Finding]:
        """Yield one finding for each mean over enough checks, where clean runs give it a bound."""
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
        """Return everything as arrays for one npz, from which `from_arrays` goes on."""
        means = list(self._means.values())
        return {
            "mean_kinds": np.asarray(list(self._means), np.str_),
            "mean_sizes": np.asarray([mean.size for mean in means], np.int64),
            "mean_checks": np.asarray([len(mean.logarithms) for mean in means], np.int64),
            "mean_logarithms": np.asarray([x for mean in means for x in mean.logarithms], np.float64),
        }

    @classmethod
    def from_arrays(cls, recipe: str, arrays: Mapping[str, np.ndarray]) -> Means:
        """Rebuild the means that `to_arrays` wrote. Raises KeyError, TypeError or ValueError if they are incomplete."""
        kinds, sizes, counts = (arrays[f"mean_{name}"].tolist() for name in ("kinds", "sizes", "checks"))
        logarithms = arrays["mean_logarithms"].tolist()
        if len(logarithms) != sum(counts) or min(counts, default=1) < 1 or not all(map(math.isfinite, logarithms)):
            raise ValueError("means of other numbers than are there")
        means = cls(recipe)
        for kind, size, count in zip(kinds, sizes, counts, strict=True):
            means._means[kind] = _Mean(None, logarithms[:count], size)
            del logarithms[:count]
        return means
