"""Gather the evidence of one step from a candidate's session; it is judged elsewhere and later.

Gathering never needs the reference and judging never needs the candidate, so the same evidence serves a check side by
side (`lockstep parity`) and one in a worker process (`lockstep train --parity.every N`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace

import numpy as np

from lockstep.core.backend import Arrays, Batch, Gradients, NotSupported, RankReport, Session, State, StepRecord
from lockstep.core.capabilities import (
    GivesEachItsOwn,
    Loads,
    ReportsRanks,
    ShowsAmaxesOfParts,
    ShowsAmaxesOfTaps,
    TapsKeepBits,
    ask,
    ranks_of,
)
from lockstep.core.checkpoint.taken_over import miscounted
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence.amaxes import amaxes_of_pass
from lockstep.core.parity.evidence.attention_logits import shown_attention_logits
from lockstep.core.parity.evidence.cached_logits import sampled_logits
from lockstep.core.parity.evidence.changed import Changed
from lockstep.core.parity.evidence.evaluation import Likeliest, evaluated, policies_of
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.held_out import HeldOut, held_out
from lockstep.core.parity.evidence.in_a_row import in_a_row
from lockstep.core.parity.evidence.into_store import gradients_into, gradients_of, state_into
from lockstep.core.parity.evidence.later_steps import later_steps
from lockstep.core.parity.evidence.loss_weights import reweighted_batches
from lockstep.core.parity.evidence.observations import Observation
from lockstep.core.parity.evidence.parts import has_parts, parts_apart, parts_of_step, sketched
from lockstep.core.parity.evidence.probe import micro_to_probe, probe_of
from lockstep.core.parity.evidence.read_back import reading_back
from lockstep.core.parity.evidence.round_trip import round_trip
from lockstep.core.parity.evidence.scales import scaled_as_in_step
from lockstep.core.parity.evidence.store import FolderStore, MemoryStore, Store
from lockstep.core.parity.evidence.sums import accumulate, reduce
from lockstep.core.parity.evidence.taps import look
from lockstep.core.streams import step_stream
from lockstep.core.train.finite import NotFinite
from lockstep.core.train.fp8_amax import layers
from lockstep.core.train.metrics import has_norms
from lockstep.core.train.validation import Validation


def gather(
    session: Session,
    config: RunConfig,
    batch: Batch,
    probe: Batch | None = None,
    norms: bool = False,
    due: str | None = None,
    tapped: Batch | None = None,
    store: Store | None = None,
    validation: Validation | None = None,
) -> Evidence:
    """Run one step of `session` on `batch` and keep what a check needs.

    The step has the weights of its batch; beside it a micro-batch with uneven weights is computed and shown.
    Without `probe` the check is thorough: the whole step is repeated by the reference, accumulation is tried
    on micro-batches with uneven weights too, and the state goes through a checkpoint. With one, made by `probe_batch`
    from a micro-batch, the session's state is never touched but by its step.
    tapped: for a thorough check, the micro-batch whose stages are shown, made by `probe_batch`; by default the first
    one, with other sequences every step.
    store: takes the tensors, each as it comes, by default one in memory. It is not finished here (`save_evidence`).
    validation: what is due after the step; the record then has its metrics.

    Into a store of several ranks each rank puts what it holds, and its evidence is as much: `place.of_all_ranks`.

    Raises whatever the session and the store raise, except NotSupported, which is listed as not covered, and NotFinite:
    such a step is judged like any other.
    """
    into = MemoryStore() if store is None else store
    shown = ask(session, GivesEachItsOwn).each_its_own() if into.ranks > 1 else nullcontext()
    with shown:
        return _gather(session, config, batch, probe, norms, due, tapped, into, validation)


def _gather(
    session: Session,
    config: RunConfig,
    batch: Batch,
    probe: Batch | None,
    norms: bool,
    due: str | None,
    tapped: Batch | None,
    into: Store,
    validation: Validation | None,
) -> Evidence:
    started = time.perf_counter()
    missing: list[str] = []

    def attempt(what: str, of: Batch, name: str) -> Gradients | None:
        try:
            return gradients_into(into, name, session, of)
        except NotSupported as reason:
            missing.append(f"{what}: {reason}")
            return None

    before = state_into(into, "before", session)
    changed = Changed(session, missing)
    started_from = changed.sums
    if isinstance(into, FolderStore) and into.ranks > 1:
        into.lend(ranks_of(session), "before/")
    thorough = probe is None
    if probe is not None:
        tapped = probe
    elif tapped is None:
        tapped = probe_of(micro_to_probe(batch, config), config, turn=before.step)
    several = has_parts(config, batch)
    # A thorough check has time for passes apart from the step, which find what only a micro-batch's place in it does.
    shows_parts = parts_of_step(session, config) if several and not thorough else None
    # The step's micro-batches first: gradients that are not cleared then show in those of the one that follows.
    own: tuple[Mapping[str, Observation], ...] = ()
    own_amaxes: tuple[Arrays, ...] = ()
    if several and shows_parts is None:
        own, own_amaxes = parts_apart(session, config, before, batch, missing)
    elif thorough and config.train.ranks == 1 and layers(config):
        own_amaxes = parts_apart(session, config, before, batch, missing)[1]
    reweighted: tuple[Mapping[str, Observation], ...] = ()
    first = batch.cut(config.train)[0]
    if thorough and config.train.ranks == 1 and (own or not several) and first.weights.any():
        with suppress(NotSupported), scaled_as_in_step(session, config, before, batch):
            reweighted = tuple(sketched(session, one) for one in reweighted_batches(first))
    probed = attempt("gradients and per-token NLL", tapped, "probed")
    probed_amaxes = amaxes_of_pass(session, config, missing) if probed is not None else {}
    # The step itself tells its gradients, where the session can: to compute them twice costs a step.
    stepped = in_passing = None
    if probed is not None:
        with suppress(NotSupported):
            in_passing = step_stream(session)
        if in_passing is None:
            stepped = gradients_into(into, "stepped", session, batch)
    likeliest = Likeliest()
    taps = look(session, config, tapped, missing, into, likeliest.note)
    tapped_amaxes: Arrays = {}
    if layers(config):
        with suppress(NotSupported):
            tapped_amaxes = ask(session, ShowsAmaxesOfTaps).amaxes_of_taps()
    if thorough:
        changed.note("gradients and taps")
    scores = dict(evaluated(session, tapped, likeliest, policies_of(config, thorough), missing))
    if thorough:
        scores |= shown_attention_logits(session, config, tapped, missing)
        changed.note("evaluation")
        scores |= sampled_logits(session, config, tapped, taps, missing)
        changed.note("sampling")
    micros = batch.cut(config.train)
    accumulated = reduced = None
    if thorough and probed is not None and config.train.accumulation > 1:
        accumulated = accumulate(session, config, before, micros, into)
    if thorough and probed is not None and config.train.ranks > 1:
        reduced = reduce(session, config, before, micros, missing, into)
    changed.note("gradients of several micro-batches" if thorough else "gradients, taps and evaluation")
    gathering = time.perf_counter() - started
    keeping = 0.0

    def keep(kind: str, name: str, array: np.ndarray) -> None:
        nonlocal keeping
        began = time.perf_counter()
        into.put(f"stepped/{kind}", name, array)
        keeping += time.perf_counter() - began

    given_to_program = reading_back(session, missing)
    if shows_parts is not None:
        shows_parts.keep_parts()
    started = time.perf_counter()
    not_finite = ""
    try:
        if in_passing is not None:
            record, shown = in_passing(batch, keep, norms)
            stepped = None if shown is None else gradients_of(into, "stepped", shown)
            if stepped is None and not thorough:
                missing.append("the step's own gradients, moments and update: the session's step did not show them")
        else:
            record = session.step(batch, norms=True) if norms else session.step(batch)
    except NotFinite as found:
        record, not_finite = found.record, found.where
        stepped = stepped if in_passing is None else gradients_into(into, "stepped again", session, batch)
    if norms and not not_finite and not has_norms(record.metrics):
        missing.append("the record's norms by group: the session's step gives none")
    # The time in which the step's gradients were kept is no part of the step.
    record = replace(record, seconds=time.perf_counter() - started - keeping)
    gathering += keeping
    step_amaxes = {} if not_finite else amaxes_of_pass(session, config, [])
    validated = None
    if validation is not None and not not_finite:
        after_step = Changed(session, [])
        validated, metrics = _validated(session, config, batch, validation)
        after_step.note("validation")
        changed.found |= after_step.found
        record = replace(record, metrics={**record.metrics, **metrics})
    started = time.perf_counter()
    misread = given_to_program(batch)
    if shows_parts is not None and layers(config):
        with suppress(NotSupported):
            own_amaxes = tuple(ask(session, ShowsAmaxesOfParts).amaxes_of_parts())
    if shows_parts is not None and not (own := tuple(shows_parts.parts_kept())):
        missing.append("the step's gradients against those of its micro-batches: the step showed none of them")
    after = state_into(into, "after", session)
    wrongly_counted = tuple(miscounted(session, after.updates))
    # A session may forget to set the scales of FP8 after a step. Whatever loads a state below would set them.
    tries_load = thorough and config.train.ranks == 1 and bool(layers(config))
    around_load = [sketched(session, first)] if tries_load else []
    if stepped is None and probed is not None and thorough:
        stepped = _computed_again(session, batch, before, after, missing, into)
    ranks = _reports(session, missing) if config.train.ranks > 1 else ()
    reloaded: State | None = None
    later: tuple[StepRecord, ...] = ()
    two_steps: Mapping[str, tuple[str, ...]] = {}
    if thorough:
        written = Changed(session, [])
        made = record, written.sums
        reloaded = round_trip(session, before, after, missing, into, lambda: written.note("a checkpoint was begun"))
        changed.found |= written.found
        if reloaded is not None:
            later = later_steps(session, config, batch, before, after, missing)
            two_steps = in_a_row(session, config, batch, before, after, made, started_from, missing)
    if around_load and reloaded is not None:
        around_load.append(sketched(session, first))
    if not thorough:
        missing.append("the checkpoint's round trip: a check during training leaves the state alone")
        missing.append("sampling: a check during training leaves it to `lockstep parity`")
        missing.append("the largest attention logits: a check during training leaves them to `lockstep parity`")
        if config.train.accumulation > 1:
            missing.append("accumulation of micro-batches that weigh differently: in `lockstep parity`")
        if config.train.ranks > 1:
            missing.append("reduced gradients against each rank's own: a check during training does not compute them")
    gathering += time.perf_counter() - started
    return Evidence(
        before,
        after,
        batch,
        record,
        stepped,
        tapped,
        probed,
        taps,
        tuple(missing),
        gathering,
        thorough,
        own,
        due=due,
        accumulated=accumulated,
        reloaded=reloaded,
        reduced=reduced,
        ranks=ranks,
        not_finite=not_finite,
        evaluated=scores,
        misread=misread,
        taps_keep_bits=_taps_keep_bits(session),
        own_in_step=shows_parts is not None,
        held_out=validated,
        reweighted=reweighted,
        later=later,
        around_load=tuple(around_load),
        probed_amaxes=probed_amaxes,
        own_amaxes=own_amaxes,
        step_amaxes=step_amaxes,
        tapped_amaxes=tapped_amaxes,
        changed=changed.found,
        in_a_row=two_steps,
        miscounted=wrongly_counted,
    )


def _taps_keep_bits(session: Session) -> bool:
    try:
        return ask(session, TapsKeepBits).taps_keep_bits
    except NotSupported:
        return False


def _validated(
    session: Session, config: RunConfig, batch: Batch, validation: Validation
) -> tuple[HeldOut, dict[str, float]]:
    """Validate. The micro-batch that is judged token by token, and its sequences, are drawn by the step's batch."""
    drawn = batch.digest()
    chosen = int(drawn[16:24], 16) % len(validation.batches)
    probe = probe_of(validation.batches[chosen], config, turn=int(drawn[24:32], 16))
    return held_out(session, validation, chosen, probe)


def _computed_again(
    session: Session, batch: Batch, before: State, after: State, missing: list[str], store: Store
) -> Gradients | None:
    """Return the gradients of a step that did not show them, computed apart from it at the state before."""
    try:
        load = ask(session, Loads).load
    except NotSupported as reason:
        missing.append(f"the step's own gradients, moments and update: its step does not show them, and {reason}")
        return None
    load(before)
    try:
        return gradients_into(store, "stepped", session, batch)
    finally:
        load(after)


def _reports(session: Session, missing: list[str]) -> tuple[RankReport, ...]:
    try:
        return tuple(ask(session, ReportsRanks).rank_reports())
    except NotSupported as reason:
        missing.append(f"whether ranks keep the same weights: {reason}")
        return ()
