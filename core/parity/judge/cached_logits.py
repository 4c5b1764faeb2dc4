"""Compare the logits that sampling computes with those of twin and truth, which compute all tokens at once.

With and without a cache, weights, keys, values and the residual stream are rounded at the same places. Only attention
of a single query has another order of summation. So the two errors are two draws with the same number of roundings. The
bound on their ratio follows from clean runs as for a mean over many tensors: the extreme to the power of MARGIN, and at
least LEAST_OF_MANY, both to the power of the scatter of their numbers.

Clean runs (`python -m lockstep.scripts.studies.clean_logits`): 144 checks of 48 shapes for each policy, at initial
weights and after 8 and 40 steps, on a sequence's last four tokens. Excesses were 0.85 … 1.09 under bf16, 0.79 … 1.28
under fp16, 0.69 … 1.64 under fp32. In 48 checks of 16 other shapes they reached 1.12, 1.21 and 1.52. 84 checks of 28
shapes under fp16 reached 1.28 there, and 1.07 … 1.22 in the four other ways of sampling. 17 tokens of one more clean
check under fp16 reached 1.47: the tokens of one sequence read the same keys and values and share their errors. So more
than SHARING tokens scatter as SHARING do. REACHED holds the extremes for many numbers, that of 1.47 included.
"""

from __future__ import annotations

import numpy as np

from lockstep.core.components.precision import PrecisionPolicy
from lockstep.core.parity.evidence.cached_logits import CACHED, FROM_DRAWN, FROM_START, LENGTHS, SECOND, UNCACHED
from lockstep.core.parity.evidence.evaluation import LOGITS
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.measures import calibrated_bounds
from lockstep.core.parity.measures.compare import Reference, finding
from lockstep.core.parity.measures.distances import Distances, distances
from lockstep.core.parity.measures.scatter import scatter
from lockstep.core.parity.measures.verdict import Finding, Measure

STAGE = "sampling"
# The largest factor between clean excesses and 1, for many numbers. Key: whether operands are rounded to a narrower
# format.
REACHED = {True: 1.188, False: 1.248}
# At most this many tokens of one sequence count as independent.
SHARING = 4
# Names in the evidence, tap, and note. The note contains the prompt's length.
MADE = (
    ((CACHED, LENGTHS), LOGITS, ""),
    (FROM_START, LOGITS, "from a prompt of one token"),
    (FROM_DRAWN, LOGITS, "from a prompt of {} tokens"),
    (SECOND, LOGITS, "from a prompt of {} tokens, in a cache that served another prompt before"),
    (UNCACHED, "next_token_logits", "without a cache"),
)


class CachedLogits:
    """The logits that a candidate samples from, judged when the reference's logits are available."""

    def __init__(self, evidence: Evidence, reference: Reference) -> None:
        self._evaluated, self._reference = evidence.evaluated, reference
        self._found: list[Finding] = []

    def take(self, twin: np.ndarray, truth: np.ndarray) -> None:
        """Judge the logits. twin, truth: logits (n, S, V) of n sequences, of which the first was decoded."""
        for (logits, lengths), tap, note in MADE:
            if logits in self._evaluated:
                at = np.asarray(self._evaluated[lengths]) - 1
                words = note.format(at[0] + 1)
                self._hold(np.asarray(self._evaluated[logits]), twin[0, at], truth[0, at], tap, words)

    def _hold(self, c: np.ndarray, w: np.ndarray, t: np.ndarray, tap: str, note: str) -> None:
        if c.shape != t.shape:
            shapes = f"candidate {c.shape}, reference {t.shape}"
            measure = Measure("mismatches", 1.0, None, 0.0, "shapes must be equal")
            self._found.append(finding(STAGE, tap, "end_to_end", (measure,), t.size, note=shapes))
            return
        d = distances(c, w, t, self._reference.stream)
        measure = held(d, carried(w, t), self._reference.config.precision.chosen)
        self._found.append(finding(STAGE, tap, "end_to_end", (measure,), t.size, note=note))

    def findings(self) -> list[Finding]:
        """Return the findings."""
        return self._found


def carried(w: np.ndarray, t: np.ndarray) -> int:
    """Estimate the number of independent errors in the twin's logits w of a few tokens.

    w, t: logits of twin and truth, (n, V).
    """
    # One of the tokens may have most of the twin's error.
    both = calibrated_bounds.carriers(t), calibrated_bounds.carriers(w.astype(np.float64) - t)
    return min(*both, SHARING * calibrated_bounds.OF_A_ROW)


def held(d: Distances, numbers: int, policy: PrecisionPolicy) -> Measure:
    """Bound the error of `numbers` independent numbers by the twin's error; under FP64, relative to the values."""
    if policy.exact:
        most = calibrated_bounds.FP64_LIMIT
        return Measure("relative_error", d.relative_error, None, most, f"FP64: {most:.0e}")
    reached, width = REACHED[policy.rounds], scatter(numbers)
    least = calibrated_bounds.LEAST_OF_MANY if policy.rounds else calibrated_bounds.LEAST_OF_SUMS
    high = max(reached**calibrated_bounds.MARGIN, least) ** width
    basis = f"clean checks reached {reached:g}, least {least:g}, few numbers ^{width:.2g}"
    if policy.in_fp32:
        high = max(high, calibrated_bounds.FP32_LIMIT / d.twin_relative_error)
        basis += f"; never below a relative error of {calibrated_bounds.FP32_LIMIT:.0e}"
    return Measure("excess", d.excess, None, high, basis)
