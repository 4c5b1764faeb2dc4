"""Judge one step: compare the evidence of a candidate with twin and truth of a reference, link by link."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from lockstep.core.backend import Batch, NotSupported, State
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.names import tap_names
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.loss_weights import weighted_rows
from lockstep.core.parity.evidence.observations import PARAMETER, Observation
from lockstep.core.parity.judge import end_to_end, local, own_step, update
from lockstep.core.parity.judge.attention_logits import attention_logits
from lockstep.core.parity.judge.cached_logits import CachedLogits
from lockstep.core.parity.judge.evaluation import Scores
from lockstep.core.parity.judge.exercised import not_exercised
from lockstep.core.parity.judge.later_steps import later_scalars, later_updates
from lockstep.core.parity.judge.lengths import with_typical_lengths
from lockstep.core.parity.judge.rank_sums import of_the_sum, same_sums
from lockstep.core.parity.judge.reports import reports
from lockstep.core.parity.judge.validation import validation
from lockstep.core.parity.measures.compare import Reference
from lockstep.core.parity.measures.decode import known_scalars
from lockstep.core.parity.measures.verdict import Check, Finding
from lockstep.core.parity.reference.stages import place
from lockstep.core.run.ranks import is_sharded
from lockstep.core.train.fp8_amax import without_amaxes
from lockstep.core.train.loss_scale import SCALE

__all__ = ["Reference", "judge", "judge_observations"]

T = TypeVar("T")


def judge(evidence: Evidence, reference: Reference) -> Check:
    """Compare every link of the chain that the evidence covers. Findings are in the order of the chain.

    With several ranks, rank 0 judges the gathered evidence, and all ranks receive its check.
    """
    return reference.ranks.of_first(lambda: _judge(evidence, reference), "`hear the verdict`")


# A non-finite number of a candidate is a finding, not a NumPy warning.
@np.errstate(invalid="ignore", over="ignore")
def _judge(evidence: Evidence, reference: Reference) -> Check:
    started = time.perf_counter()
    missing = [*evidence.not_covered, *reference.not_asked]
    missing += update.not_judged(reference.config, evidence.before.step)
    known = known_scalars(reference.config, evidence.batch, evidence.record, evidence.before.step + 1)
    reference = replace(reference, known=known)
    state = list(update.weights(evidence, reference))
    findings = [*update.data(evidence), *state]
    if state[0].ok:
        program = local.Program(evidence, reference)
        scores = Scores(evidence.evaluated, reference, others=_nll_of_others(evidence, reference.config))
        cached = CachedLogits(evidence, reference)
        left_out: list[str] = []
        with _beside(reference, partial(_of_evidence, evidence, reference)) as of_evidence:
            repeated = _repeated(evidence, reference, missing, program, (scores.take, cached.take))
            of_own, shown, again = own_step.findings(evidence, reference, left_out)
            kept, of_model, of_step, lost = of_evidence()
        missing += lost
        findings += [*of_model, *_as_far_as_it_goes(program.findings, missing)]
        if repeated:
            compared = partial(end_to_end.compare_with, kept, repeated, reference)
            findings += _as_far_as_it_goes(compared, missing)
            findings += attention_logits(evidence, reference, repeated, missing)
        missing += left_out
        findings += of_step
        findings += [*scores.findings(missing), *cached.findings()]
        findings += _as_far_as_it_goes(partial(validation, evidence, reference, missing), missing)
        if reference.over_steps:
            findings += reference.over_steps.findings()
        if repeated:
            findings = _finite_or_blamed(findings, evidence.before, kept, repeated, missing)
        findings += _finite_or_blamed(of_own, evidence.before, shown, again, missing) if again else of_own
        findings = of_the_sum(with_typical_lengths(findings, known), reference.config)
        if all(one.ok for one in findings):
            findings += update.in_a_row(evidence)
        # If loading a state changes it, the steps after it are not the run's.
        if all(one.ok for one in findings):
            findings += later_scalars(evidence, reference)
            findings += _as_far_as_it_goes(partial(later_updates, evidence, reference), missing)
    else:
        missing.append("comparisons that need the weights: the reference has no such parameters")
    unseen = len(evidence.tapped.tokens) - len(evidence.weighted.tokens)
    if evidence.taps and unseen:
        missing.append(f"local checks of {unseen} of the micro-batch's sequences")
    if reference.config.train.ranks == 1:
        missing.append("reduction over ranks: one process")
    missing += local.not_compared(evidence)
    if is_sharded(reference.config) and evidence.taps:
        missing.append("local checks of the backward stages on ranks other than 0: the tapped loss has no weight there")
    idle = not_exercised(evidence, reference.config)
    missing += [f"{lever}, which was not exercised: {why}" for lever, why in idle.items() if why]
    seconds = time.perf_counter() - started + evidence.seconds
    return Check(evidence.record.step, in_order(findings), tuple(missing), seconds, not_exercised=tuple(idle))


def _nll_of_others(evidence: Evidence, config: RunConfig) -> np.ndarray | None:
    """Return the step's NLL of the tapped micro-batch's sequences without weight; NaN for tokens outside the loss."""
    of_step = own_step.nll_of_tapped(evidence, config)
    if of_step is None:
        return None
    rows = weighted_rows(evidence.tapped)
    nll, weights = (np.delete(x, rows, axis=0) for x in (of_step.nll, of_step.batch.weights))
    return np.where(weights > 0, nll, np.nan)


@contextmanager
def _beside(reference: Reference, work: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Run `work` in a second thread, and yield a function that returns its result.

    If only one thread at a time may use the reference, that function runs the work.
    """
    if not reference.threads:
        yield work
        return
    with ThreadPoolExecutor(1, thread_name_prefix="lockstep-judge") as thread:
        # The copied context has NumPy's settings for floating-point errors.
        yield thread.submit(copy_context().run, work).result


def _of_evidence(
    evidence: Evidence, reference: Reference
) -> tuple[end_to_end.Observations, list[Finding], list[Finding], list[str]]:
    """Judge all links that need no repetition of the model.

    Returns observations, findings of the stages, findings of the step, and descriptions of missing comparisons.
    """
    lost: list[str] = []
    of_model: tuple[Callable[[], Iterator[Finding]], ...] = (
        lambda: local.stages(evidence, reference, lost),
        lambda: local.accumulation(evidence, reference),
        lambda: local.reduction(evidence, reference),
        lambda: same_sums(evidence.ranks),
    )
    of_step: tuple[Callable[[], Iterator[Finding]], ...] = (
        lambda: update.step_scalars(evidence, reference),
        lambda: update.update(evidence, reference),
        lambda: update.loss_scale(evidence, reference),
        lambda: reports(evidence, reference.config, lost),
        lambda: update.checkpoint(evidence, reference),
    )
    kept = end_to_end.observations_of(evidence, reference.config.model)
    found = [found for part in of_model for found in _as_far_as_it_goes(part, lost)]
    return kept, found, [found for part in of_step for found in _as_far_as_it_goes(part, lost)], lost


def judge_observations(
    found: Mapping[str, Observation],
    about: Mapping[str, Any],
    state: State,
    probe: Batch,
    tapped: Batch,
    reference: Reference,
) -> Check:
    """Judge recorded observations, end to end only. The reference computes from the state before the step.

    about: record stored with the observations; only `step` is read.
    Raises NotSupported if the reference gives no gradients.
    """
    return reference.ranks.of_first(lambda: _judge_observations(found, about, state, probe, tapped, reference))


@np.errstate(invalid="ignore", over="ignore")
def _judge_observations(
    found: Mapping[str, Observation],
    about: Mapping[str, Any],
    state: State,
    probe: Batch,
    tapped: Batch,
    reference: Reference,
) -> Check:
    started = time.perf_counter()
    missing = ["local checks: they need tensors, and only sketches were recorded", *reference.not_asked]
    if not any(name in found for name in tap_names(reference.config.model)):
        missing.append("taps end to end: only the step's own gradients were recorded")
    repeated = end_to_end.repeat(found, state, probe, tapped, reference, missing)
    findings = list(end_to_end.compare_with(found, repeated, reference))
    findings = _finite_or_blamed(findings, state, found, repeated, missing)
    return Check(int(about["step"]), in_order(findings), tuple(missing), time.perf_counter() - started)


def in_order(findings: list[Finding]) -> tuple[Finding, ...]:
    """Sort findings in the order of the chain. Local findings come before end-to-end ones."""
    scopes = {"local": 0, "over_steps": 1, "end_to_end": 2}
    return tuple(sorted(findings, key=lambda f: (*place(f.stage, f.phase, f.layer), scopes[f.scope])))


def _finite_or_blamed(
    findings: list[Finding],
    before: State,
    kept: Mapping[str, Observation],
    repeated: end_to_end.Repeated,
    missing: list[str],
) -> list[Finding]:
    """Drop findings that are not finite if the twin's step overflows as well."""
    if not (without_amaxes(before.scalars) and _overflows(kept) and _overflows(repeated.twin)):
        return findings
    there = [f for f in findings if all(math.isfinite(m.value) for m in f.measures)]
    gone, scale = len(findings) - len(there), before.scalars.get(SCALE)
    at_scale = f"outside FP16's range at a loss scale of {scale:g}, as in the twin" if scale else ""
    missing.append(f"{gone} comparisons of numbers {at_scale or 'that are not finite, as in the twin'}")
    return there


def _overflows(found: Mapping[str, Observation]) -> bool:
    """Return whether the gradient of a parameter is not finite."""
    return any(one.nonfinite for name, one in found.items() if name.startswith(PARAMETER))


def _repeated(
    evidence: Evidence,
    reference: Reference,
    missing: list[str],
    program: local.Program,
    of_logits: Sequence[end_to_end.TakesLogits],
) -> end_to_end.Repeated | None:
    asked = end_to_end.names_observed(evidence, reference.config.model)
    try:
        before, tapped = evidence.before, evidence.tapped
        return end_to_end.repeat(asked, before, tapped, tapped, reference, missing, program, of_logits)
    except NotSupported as reason:
        missing.append(f"end-to-end comparisons: {reason}")
        return None


def _as_far_as_it_goes(part: Callable[[], Iterator[Finding]], missing: list[str]) -> list[Finding]:
    """Collect the findings of one part, up to a NotSupported of the reference."""
    found: list[Finding] = []
    try:
        for one in part():
            found.append(one)
    except NotSupported as reason:
        missing.append(str(reason))
    return found
