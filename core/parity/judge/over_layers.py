"""Geometric means over layers of one tensor's excess, end to end.

The ratio of errors of one tensor has little power end to end: its bound is five times the extreme of clean runs. A
fault in one kind of tensor in each layer (queries and keys, for example) is a small part of the mean over all
parameters, but all of the mean over layers of this tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lockstep.core.parity.judge.aggregates import geometric_mean
from lockstep.core.parity.measures import calibrated_bounds
from lockstep.core.parity.measures.compare import Reference, finding
from lockstep.core.parity.measures.distances import Distances
from lockstep.core.parity.measures.verdict import OVER_LAYERS, Finding


@dataclass
class OverLayers:
    """The end-to-end comparisons of one check, for the mean of each tensor over its layers."""

    reference: Reference
    _seen: dict[tuple[str, str, str, str], list[tuple[float, int]]] = field(default_factory=dict)

    def add(self, found: Finding, kind: str, errors: int) -> None:
        """Add a comparison of a layer's tensor. errors: number of independent errors in the tensor."""
        excess = next((m.value for m in found.measures if m.name == "excess"), None)
        if found.layer is not None and excess is not None:
            tensor = found.tap.split(".", 2)[2]
            self._seen.setdefault((found.stage, found.phase, tensor, kind), []).append((excess, errors))

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each tensor of at least two layers, if clean runs of the recipe measured such means."""
        for (stage, phase, tensor, kind), seen in self._seen.items():
            if len(seen) < 2:
                continue
            kind += calibrated_bounds.OVER_LAYERS
            together = Distances(geometric_mean([excess for excess, _ in seen]), 0.0, 0.0, 0.0, 0.0, 0.0)
            bounds = self.reference.measures(kind, together, min(errors for _, errors in seen))
            if only := tuple(m for m in bounds if m.name == "excess"):
                yield finding(stage, OVER_LAYERS + tensor, "end_to_end", only, len(seen), phase=phase)
