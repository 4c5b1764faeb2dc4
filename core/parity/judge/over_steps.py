"""Local comparisons summed over the checks of a run: findings of scope `over_steps` (core/parity/judge/bias.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from lockstep.core.errors import UserError
from lockstep.core.parity.judge.aggregates import Means
from lockstep.core.parity.judge.bias import Bias, Key
from lockstep.core.parity.measures import calibrated_bounds
from lockstep.core.parity.measures.verdict import Finding


@dataclass(frozen=True)
class _Comparison:
    """Hold the inputs of a key's bounds, and a finding as the pattern of the new one."""

    finding: Finding
    kind: str
    size: int


@dataclass
class OverSteps:
    """The running sums of one run, and what they say after each check. means: of excesses end to end."""

    recipe: str
    bias: Bias = field(default_factory=Bias)
    means: Means = field(init=False)
    _seen: dict[Key, _Comparison] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.means = Means(self.recipe)

    def add(
        self,
        found: Finding,
        kind: str,
        size: int,
        sketches: tuple[np.ndarray, np.ndarray, np.ndarray],
        stream: type[np.floating],
        gain_difference: float,
    ) -> None:
        """Add a local comparison that holds by itself. sketches: (K,) of c − w, w − t and t."""
        key = (found.stage, found.phase, found.tap)
        if self.bias.add(key, *sketches, stream, gain_difference):
            self._seen[key] = _Comparison(found, kind, size)

    def findings(self) -> Iterator[Finding]:
        """One finding for every key that was added to since the last call and has enough checks behind it."""
        for key, seen in self._seen.items():
            limits = calibrated_bounds.limits(self.recipe, seen.kind, seen.size)
            measures = self.bias.measures(key, limits.distance, limits.gain, seen.size)
            if measures:
                f = seen.finding
                yield Finding(f.stage, f.tap, f.phase, f.layer, "over_steps", measures, f.size)
        self._seen.clear()
        yield from self.means.findings()

    def resume(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Go on from the sums of an earlier part of the run. Raises UserError if they are not whole."""
        if self.bias.keys:
            raise UserError("sums were begun already")
        self.bias = Bias.from_arrays(arrays)
