"""Sum local comparisons over the checks of a run: findings of scope `over_steps` (core/parity/judge/bias.py)."""

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
    """The arguments of a key's bounds, and a finding as the pattern of the new one."""

    finding: Finding
    kind: str
    size: int
    systematic: float


@dataclass
class OverSteps:
    """The running sums of one run, and their findings after each check.

    means: means of end-to-end excesses.
    last_step: step of the last check in the sums.
    accused: whether a sum exceeded its bounds.
    """

    recipe: str
    bias: Bias = field(default_factory=Bias)
    means: Means = field(init=False)
    last_step: int = 0
    accused: bool = False
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
        systematic: float = 0.0,
    ) -> None:
        """Add a local comparison that holds. sketches: (K,) of c − w, w − t and t.

        systematic: error of a matrix unit's sums that all checks have in common, in units of the twin's error.
        """
        key = (found.stage, found.phase, found.tap)
        # After a resume, a run may continue with micro-batches of another size.
        if self.bias.length(key) not in (None, len(sketches[0])):
            self.bias.forget(key)
        if self.bias.add(key, *sketches, stream, gain_difference):
            self._seen[key] = _Comparison(found, kind, size, systematic)

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each key that has changed since the last call and has enough checks."""
        for found in self._findings():
            self.accused |= not found.ok
            yield found

    def _findings(self) -> Iterator[Finding]:
        for key, seen in self._seen.items():
            limits = calibrated_bounds.limits(self.recipe, seen.kind, seen.size)
            measures = self.bias.measures(key, limits.distance, limits.gain, seen.size, seen.systematic)
            if measures:
                f = seen.finding
                yield Finding(f.stage, f.tap, f.phase, f.layer, "over_steps", measures, f.size)
        self._seen.clear()
        yield from self.means.findings()

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the state as arrays for one npz file. `resumed` is the inverse."""
        about = {"recipe": self.recipe, "last_step": self.last_step, "accused": self.accused}
        return self.bias.to_arrays() | self.means.to_arrays() | {name: np.asarray(x) for name, x in about.items()}

    @classmethod
    def resumed(cls, recipe: str, arrays: Mapping[str, np.ndarray], step: int) -> OverSteps | None:
        """Restore the sums of an earlier part of a run before its check of `step`.

        Returns None if the sums must start again. The sums start again if they have another recipe, or contain checks
        of steps that the run repeats. The sums also start again if one of them had exceeded its bounds: the user has
        presumably mended the fault before the resume, and the old checks would count against the mended program. Raises
        UserError if the arrays are incomplete.
        """
        try:
            stored, last_step, accused = str(arrays["recipe"]), int(arrays["last_step"]), bool(arrays["accused"])
            if stored != recipe or last_step >= step or accused:
                return None
            sums = cls(recipe, Bias.from_arrays(arrays), last_step=last_step)
            sums.means = Means.from_arrays(recipe, arrays)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"these sums over checks are incomplete: {error}") from None
        return sums
