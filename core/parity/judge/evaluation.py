"""Compare a candidate's `evaluate` with the logits of twin and truth, computed from the candidate's weights.

NLL is compared as the loss is. `top1` states whether the target has the largest logit, and is exact except for ties:
let e be `furthest` times the largest error of the twin's logits. The difference of two honest logits is within 2e of
the truth's. So if the truth's target leads or trails by more than 2e, only one answer is correct.

Clean runs (`python -m lockstep.scripts.studies.clean_logits`): in 144 checks of 48 shapes for each policy, the largest
error of a session's logits was at most FURTHEST times the twin's. In 48 checks of 16 other shapes it was 1.15 times
under bf16, 1.25 under fp16 and 2.28 under fp32.

For sequences without logits from the reference, the NLL is compared with the step's NLL of the same sequences, which is
judged with the step. Two honest results differ by about the twin's error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.core.backend import Arrays
from lockstep.core.components.precision import PrecisionPolicy
from lockstep.core.parity.evidence.evaluation import AT_ONCE, OTHERS, POLICIES, TARGETS, key
from lockstep.core.parity.measures import calibrated_bounds, peak_bounds
from lockstep.core.parity.measures.compare import Reference, compare, finding, relative_difference
from lockstep.core.parity.measures.distances import FLOOR_ULPS
from lockstep.core.parity.measures.stretches import stretches
from lockstep.core.parity.measures.verdict import Finding, Measure
from lockstep.core.parity.reference.stages import stages_of

STAGE = "evaluation"
# The largest ratio in clean runs. Key: whether operands are rounded to a narrower format.
FURTHEST = {True: 1.449, False: 3.054}
# Bound on the RMS distance between a sequence's NLL from `evaluate` and from a step, in units of the twin's error. 75
# clean checks of 15 shapes (bf16 eager and compiled, fp16) reached 0.24 under the run's policy and 1.85 under FP32.
APART = 8.0


def furthest(policy: PrecisionPolicy) -> float:
    """Return the allowed ratio of an honest logit's largest error to the twin's, as for largest elements of stages."""
    least = peak_bounds.LEAST["rounded" if policy.rounds else "sum"].largest
    return max(calibrated_bounds.MARGIN * FURTHEST[policy.rounds], least)


class Scores:
    """Scores of a candidate, judged when the reference's logits are available.

    evaluated: as from `core/parity/evidence/evaluation.py`.
    of: prefix of `nll` and `top1` in the tap of a finding.
    others: NLL (m, S) from the step, of the sequences without weight; NaN for tokens outside the loss.
    """

    def __init__(self, evaluated: Arrays, reference: Reference, of: str = "", others: np.ndarray | None = None) -> None:
        self._evaluated, self._reference, self._of, self._others = evaluated, reference, of, others
        self._found: list[Finding] = []
        self._missing: list[str] = []

    def take(self, twin: np.ndarray, truth: np.ndarray) -> None:
        """Judge all scores. twin, truth: logits (n, S, V) of the evaluated sequences."""
        if TARGETS not in self._evaluated:
            return
        reference = self._reference
        due = Due.of(twin, truth, np.asarray(self._evaluated[TARGETS]))
        kind = calibrated_bounds.tap_kind(stages_of(reference.config)[-1].id, "forward")
        for policy in POLICIES:
            of_nll, of_top1 = key("nll", policy), key("top1", policy)
            if of_nll not in self._evaluated:
                continue
            tap, guessed = self._of + of_nll, self._of + of_top1
            nll = np.asarray(self._evaluated[of_nll])
            if policy is None:
                exact = reference.config.precision.exact
                least = calibrated_bounds.FP64_LIMIT if exact else FLOOR_ULPS * float(np.finfo(reference.stream).eps)
                w = due.twin_nll.astype(reference.stream)
                self._found.append(compare(reference, STAGE, kind, tap, "end_to_end", nll, w, due.nll))
            else:
                least = calibrated_bounds.FP32_LIMIT
                self._found.append(_in_fp32(tap, nll, due.nll))
            if self._others is not None and of_nll + OTHERS in self._evaluated:
                off = max(due.error_of_nll, least * float(np.sqrt(np.square(due.nll).mean())))
                found = np.asarray(self._evaluated[of_nll + OTHERS])
                self._found.append(_as_in_the_step(tap + OTHERS, found, self._others, off))
            error = furthest(reference.config.precision.chosen) * max(due.error, least * due.largest)
            if (np.abs(due.lead) > 2 * error).any():
                self._found.append(_guessed(guessed, np.asarray(self._evaluated[of_top1]), due.lead, error))
            else:
                self._missing.append(f"evaluation: {guessed}: for every token the target is in a tie")

    def findings(self, missing: list[str]) -> list[Finding]:
        """Return the findings. Scores that were not judged are appended to `missing`, with the reason."""
        missing += self._missing
        if TARGETS in self._evaluated and not self._found:
            missing.append("evaluation and sampling: the reference shows no logits")
        return self._found


@dataclass(frozen=True)
class Due:
    """The scores that follow from the logits of twin and truth; arrays are (n, S) float64.

    nll, twin_nll: log Σ exp(logits) − the target's logit.
    lead: the target's logit minus the largest other logit, in the truth.
    error: the largest error of the twin's logits.
    largest: the largest magnitude of the truth's logits.
    """

    nll: np.ndarray
    twin_nll: np.ndarray
    lead: np.ndarray
    error: float
    largest: float

    @property
    def error_of_nll(self) -> float:
        """RMS error of the twin's NLL."""
        return float(np.sqrt(np.square(self.twin_nll - self.nll).mean()))

    @classmethod
    def of(cls, twin: np.ndarray, truth: np.ndarray, targets: np.ndarray) -> Due:
        """Compute the scores from logits (n, S, V), some tokens at a time."""
        vocab = truth.shape[-1]
        w, t, target = twin.reshape(-1, vocab), truth.reshape(-1, vocab), targets.reshape(-1, 1).astype(np.int64)
        nll, twin_nll, lead = (np.empty(len(t)) for _ in range(3))
        error = largest = 0.0
        for which in stretches(len(t), max(1, AT_ONCE // vocab)):
            wide = t[which].astype(np.float64)
            apart = w[which].astype(np.float64)
            nll[which], twin_nll[which] = _nll(wide, target[which]), _nll(apart, target[which])
            apart -= wide
            error, largest = max(error, float(np.abs(apart).max())), max(largest, float(np.abs(wide).max()))
            own = np.take_along_axis(wide, target[which], axis=-1)[:, 0]
            np.put_along_axis(wide, target[which], -np.inf, axis=-1)
            lead[which] = own - wide.max(axis=-1)
        shape = targets.shape
        return cls(nll.reshape(shape), twin_nll.reshape(shape), lead.reshape(shape), error, largest)


def _nll(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return log Σ exp(logits) − the target's logit, (N,), from logits (N, V) and targets (N, 1)."""
    largest = logits.max(axis=-1, keepdims=True)
    total = np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True)) + largest
    return np.asarray(total - np.take_along_axis(logits, targets, axis=-1))[:, 0]


def _in_fp32(tap: str, nll: np.ndarray, truth: np.ndarray) -> Finding:
    """Compare NLL under the FP32 policy with the truth."""
    apart = relative_difference(nll, truth) if nll.shape == truth.shape else float("inf")
    most = calibrated_bounds.FP32_LIMIT
    measure = Measure("relative_error", apart, None, most, f"FP32 end to end: {most:.0e}")
    return finding(STAGE, tap, "end_to_end", (measure,), truth.size)


def _as_in_the_step(tap: str, nll: np.ndarray, own: np.ndarray, error: float) -> Finding:
    """Compare NLL of `evaluate` with that of the same sequences in a step. error: RMS error of a token, in nats."""
    apart = np.inf
    if nll.shape == own.shape:
        counted = np.isfinite(own)
        squares = np.square(nll.astype(np.float64) - np.where(counted, own, nll)).sum(axis=-1)
        apart = float(np.sqrt((squares / np.maximum(counted.sum(axis=-1), 1)).max()))
    basis = f"as in a step, within {APART:g} of the twin's error {error:.1e}, in nats"
    return finding(STAGE, tap, "end_to_end", (Measure("difference", apart, None, APART * error, basis),), own.size)


def _guessed(tap: str, top1: np.ndarray, lead: np.ndarray, error: float) -> Finding:
    """Count tokens whose `top1` differs from the truth's, without ties. error: the largest honest error of a logit."""
    clear = np.abs(lead) > 2 * error
    count = int(np.count_nonzero(clear))
    if top1.shape != lead.shape:
        wrong, note = count, f"candidate {top1.shape}, reference {lead.shape}"
    else:
        wrong, note = int(np.count_nonzero((top1.astype(bool) != (lead > 0)) & clear)), ""
    where = f"{count} of {lead.size} tokens"
    basis = f"equal where the truth's target leads or trails by more than 2·{error:.2g}: {where}"
    return finding(STAGE, tap, "end_to_end", (Measure("mismatches", float(wrong), None, 0.0, basis),), count, note=note)
