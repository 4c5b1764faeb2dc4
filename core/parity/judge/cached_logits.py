"""Hold the logits that sampling makes with a cache to those of twin and truth, which compute all tokens together.

Both round in the same places: weights, keys, values and the stream. Only attention of a single query is summed in
another order. So their errors are two draws of the same many roundings, and of narrow formats one is at most twice the
other: measured over all lengths in parity_tests/torch_backend/test_generate.py. Bounds of logits end to end are those
of few numbers here, and hide a wrong cache in a model that has hardly been trained.
"""

from __future__ import annotations

import numpy as np

from lockstep.core.config.schema import PrecisionConfig
from lockstep.core.parity.evidence.cached_logits import CACHED, LENGTHS
from lockstep.core.parity.evidence.evaluation import LOGITS
from lockstep.core.parity.evidence.gather import Evidence
from lockstep.core.parity.measures import calibrated_bounds
from lockstep.core.parity.measures.compare import Reference, finding
from lockstep.core.parity.measures.distances import Distances, distances
from lockstep.core.parity.measures.verdict import Finding, Measure

STAGE = "sampling"
# How often the twin's error an honest one can be: of narrow formats, and of FP32, whose sums follow no declared order.
NARROW, IN_FP32 = 2.0, 4.0


class CachedLogits:
    """The logits of a candidate's cache, judged when the reference's logits come by."""

    def __init__(self, evidence: Evidence, reference: Reference) -> None:
        self._evaluated, self._reference = evidence.evaluated, reference
        self._found: list[Finding] = []

    def take(self, twin: np.ndarray, truth: np.ndarray) -> None:
        """Judge them. twin, truth: logits (n, S, V) of the sequences whose first one was decoded."""
        if CACHED not in self._evaluated:
            return
        last = np.asarray(self._evaluated[LENGTHS]) - 1
        w, t, c = twin[0, last], truth[0, last], np.asarray(self._evaluated[CACHED])
        if c.shape != t.shape:
            note = f"candidate {c.shape}, reference {t.shape}"
            measure = Measure("mismatches", 1.0, None, 0.0, "shapes must be equal")
            self._found.append(finding(STAGE, LOGITS, "end_to_end", (measure,), t.size, note=note))
            return
        measure = _held(distances(c, w, t, self._reference.stream), self._reference.config.precision)
        self._found.append(finding(STAGE, LOGITS, "end_to_end", (measure,), t.size))

    def findings(self) -> list[Finding]:
        """Return what was judged."""
        return self._found


def _held(d: Distances, precision: PrecisionConfig) -> Measure:
    """Hold the error to the twin's, or under FP64, which has no truth above it, to the values."""
    if precision.exact:
        most = calibrated_bounds.FP64_LIMIT
        return Measure("relative_error", d.relative_error, None, most, f"FP64: {most:.0e}")
    if precision.chosen.in_fp32:
        least = calibrated_bounds.FP32_LIMIT / d.twin_relative_error
        basis = f"the twin's error ×{IN_FP32:g}; never below a relative error of {calibrated_bounds.FP32_LIMIT:.0e}"
        return Measure("excess", d.excess, None, max(IN_FP32, least), basis)
    return Measure("excess", d.excess, None, NARROW, f"the same roundings once more: the twin's error ×{NARROW:g}")
