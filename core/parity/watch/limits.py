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
# A loss is one number, so its error is a single draw, and a ratio of two draws has no largest value. Both errors are
# therefore compared with a unit from the twin's gradients (`loss_unit`), which overstates the error of a mean over
# many.
LOSS_UNITS = 4.0


@dataclass(frozen=True)
class Limits:
    """Bounds on gradients and outputs of a large tensor, and why.

    excess, distance, gain: as lockstep.core.parity.measures.calibrated_bounds.Limits, for many numbers; few numbers
    widen them by their scatter.
    relative_error: the one bound under fp64. loss: in units of `loss_unit`.
    """

    excess: float
    distance: float
    gain: float
    relative_error: float
    loss: float
    basis: str

    @classmethod
    def nearest(cls, precision: Precision) -> Limits:
        """Return the widest bounds over the kinds of gradients that clean runs of Lockstep's own eager program set.

        A stranger's model is not calibrated. The twin is its owner's own function, so the measure is the same ratio of
        two roundings of one function, by the same two libraries.
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
        # For large tensors only, whose own scatter is negligible.
        found = [calibrated_bounds.limits(recipe, kind, 2**60) for kind in kinds]
        basis = f"widest over the gradients of clean {recipe} runs of Lockstep's model, the nearest calibrated recipe"
        widest = {key: max(getattr(one, key) for one in found) for key in ("excess", "distance", "gain")}
        return cls(**widest, relative_error=math.inf, loss=LOSS_UNITS, basis=basis)

    def given(self, bounds: Mapping[str, float]) -> Limits:
        """Return the same with the user's own bounds. Raises UserError for a name that is no bound."""
        known = {"excess", "distance", "gain", "relative_error", "loss"}
        if unknown := sorted(set(bounds) - known):
            raise UserError(f"bounds has no {unknown[0]!r}; it takes {', '.join(sorted(known))}")
        basis = f"{', '.join(bounds)} given by bounds=; else {self.basis}"
        return Limits(**{key: bounds.get(key, getattr(self, key)) for key in known}, basis=basis)


@dataclass
class Extremes:
    """The largest of each measure over the checks that only measure, in units of the bound's scatter."""

    log_excess: float = 0.0
    distance: float = 0.0
    gain: float = 0.0
    relative_error: float = 0.0
    loss: float = 0.0
    checks: int = 0

    def see(self, d: Distances, size: int) -> None:
        """Take one comparison of `size` independent numbers into account."""
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
