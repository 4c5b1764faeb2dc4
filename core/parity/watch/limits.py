"""Bounds on a watched trainer's distance from its reference: derived, calibrated, or given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lockstep.core.errors import UserError
from lockstep.core.parity.measures import calibrated_bounds
from lockstep.core.parity.measures.distances import Distances
from lockstep.core.parity.measures.scatter import scatter

Precision = Literal["fp32", "bf16", "fp64"]
# The error of a loss is a single random number, so the ratio of two such errors has no upper limit. Both errors are
# therefore divided by a unit from the twin's gradients (`loss_unit`), which is an overestimate for the mean over many
# tokens.
LOSS_UNITS = 4.0


@dataclass(frozen=True)
class Limits:
    """Bounds on the gradients and outputs of a large tensor, and their basis in words.

    excess, distance, gain: as in core/parity/measures/calibrated_bounds.py. A tensor of few numbers has wider ones, by
    its scatter.
    relative_error: the only bound under fp64.
    loss: in units of `loss_unit`.
    """

    excess: float
    distance: float
    gain: float
    relative_error: float
    loss: float
    basis: str

    @classmethod
    def nearest(cls, precision: Precision) -> Limits:
        """Return the widest calibrated bounds of any gradient of Lockstep's own eager program.

        A user's model is not calibrated. Its measures are of the same type: the ratio of two rounding errors of one
        function, computed by the same two libraries.
        """
        if precision == "fp64":
            basis = "FP64 has no truth above it"
            return cls(math.inf, math.inf, math.inf, calibrated_bounds.FP64_LIMIT, LOSS_UNITS, basis)
        recipe = f"{precision}/eager"
        kinds = [
            k
            for k in calibrated_bounds.table()[recipe]
            if k.startswith("gradients/") and not calibrated_bounds.is_mean(k)
        ]
        # Bounds for large tensors, whose own scatter is negligible.
        found = [calibrated_bounds.limits(recipe, kind, 2**60) for kind in kinds]
        basis = f"widest over the gradients of clean {recipe} runs of Lockstep's model, the nearest calibrated recipe"
        widest = {key: max(getattr(one, key) for one in found) for key in ("excess", "distance", "gain")}
        return cls(**widest, relative_error=math.inf, loss=LOSS_UNITS, basis=basis)

    def given(self, bounds: Mapping[str, float]) -> Limits:
        """Return a copy with the user's own bounds. Raises UserError for a name that is no bound."""
        known = {"excess", "distance", "gain", "relative_error", "loss"}
        if unknown := sorted(set(bounds) - known):
            raise UserError(f"bounds has no {unknown[0]!r}; it takes {', '.join(sorted(known))}")
        basis = f"{', '.join(bounds)} given by bounds=; else {self.basis}"
        return Limits(**{key: bounds.get(key, getattr(self, key)) for key in known}, basis=basis)


@dataclass
class Extremes:
    """The largest value of each measure over the calibrating checks, divided by the scatter of its tensor."""

    log_excess: float = 0.0
    distance: float = 0.0
    gain: float = 0.0
    relative_error: float = 0.0
    loss: float = 0.0
    checks: int = 0

    def see(self, d: Distances, size: int) -> None:
        """Update the extremes with one comparison of `size` independent numbers."""
        width = scatter(size)
        self.log_excess = max(self.log_excess, abs(math.log(d.excess)) / width)
        self.distance = max(self.distance, d.twin_distance / width)
        self.gain = max(self.gain, abs(d.gain_difference) / d.twin_relative_error / width)
        self.relative_error = max(self.relative_error, d.relative_error)

    def limits(self, precision: Precision) -> Limits:
        """Return bounds from these extremes, with the margins of core/parity/measures/calibrated_bounds.py."""
        wider = calibrated_bounds.margin("gradients/")
        basis = f"{self.checks} checks of this run, taken as honest by calibrate=, reached {{}}, with margin {wider:g}"
        return Limits(
            excess=max(math.exp(wider * self.log_excess), calibrated_bounds.LEAST_EXCESS),
            distance=max(wider * self.distance, calibrated_bounds.LEAST_DISTANCE),
            gain=max(calibrated_bounds.MARGIN * self.gain, calibrated_bounds.LEAST_GAIN),
            relative_error=max(wider * self.relative_error, calibrated_bounds.FP64_LIMIT)
            if precision == "fp64"
            else math.inf,
            loss=max(wider * self.loss, 1.0),
            basis=basis.format(f"excess {math.exp(self.log_excess):.2g}, distance {self.distance:.2g}"),
        )
