"""Run the passes of a check that come after its step."""

from __future__ import annotations

from dataclasses import replace

from lockstep.core.backend import NotSupported, RankReport, Session
from lockstep.core.capabilities import Loads, ReportsRanks, ask, ranks_of
from lockstep.core.checkpoint.taken_over import miscounted
from lockstep.core.parity.evidence.amaxes import amaxes_of_parts
from lockstep.core.parity.evidence.changed import Changed
from lockstep.core.parity.evidence.gathering import Gathering
from lockstep.core.parity.evidence.held_out import held_out
from lockstep.core.parity.evidence.in_a_row import Follows, in_a_row
from lockstep.core.parity.evidence.into_store import gradients_into, state_into
from lockstep.core.parity.evidence.later_steps import Later, later_steps
from lockstep.core.parity.evidence.left_out import left_out
from lockstep.core.parity.evidence.parts import sketched
from lockstep.core.parity.evidence.probe import probe_of
from lockstep.core.parity.evidence.round_trip import round_trip
from lockstep.core.parity.evidence.store import FolderStore
from lockstep.core.train.fp8_amax import layers
from lockstep.core.train.validation import Validation


def validate(found: Gathering, validation: Validation) -> None:
    """Run the validation that is due, and add its metrics to the step's record.

    The digest of the step's batch selects the micro-batch that is judged token by token, and its sequences.
    """
    unchanged = Changed(found.session, [])
    drawn = found.batch.digest()
    chosen = int(drawn[16:24], 16) % len(validation.batches)
    probe = probe_of(validation.batches[chosen], found.config, turn=int(drawn[24:32], 16))
    found.held_out, metrics = held_out(found.session, validation, chosen, probe)
    unchanged.note("validation")
    found.changed.found |= unchanged.found
    found.record = replace(found.record, metrics={**found.record.metrics, **metrics})


def after_step(found: Gathering) -> None:
    """Run all passes after the step except validation, in this order.

    The session ends with the state after the step.
    """
    session, config = found.session, found.config
    _take_parts(found)
    found.after = state_into(found.store, "after", session)
    found.miscounted = tuple(miscounted(session, found.after.updates))
    # A session may forget to set FP8's scales after a step. A later load would set them and hide this fault.
    tries_load = found.thorough and config.train.ranks == 1 and bool(layers(config))
    if tries_load:
        found.around_load = (sketched(session, found.micros[0]),)
    if found.thorough and found.stepped is None and found.probed is not None:
        _compute_again(found)
    if config.train.ranks > 1:
        found.ranks = _reports(session, found.missing)
    if found.thorough:
        _try_checkpoint(found)
    else:
        _name_left_out(found)
    if tries_load and found.reloaded is not None:
        found.around_load = (*found.around_load, sketched(session, found.micros[0]))


def _take_parts(found: Gathering) -> None:
    """Read the results of the single micro-batches, if the step was requested to keep them."""
    if found.shows_parts is None:
        return
    found.own_amaxes = amaxes_of_parts(found.session, found.config)
    found.own = tuple(found.shows_parts.parts_kept())
    if not found.own:
        found.missing.append("the step's gradients against those of its micro-batches: the step showed none of them")


def _compute_again(found: Gathering) -> None:
    """Compute the gradients of a step that did not show them, from the state before it."""
    try:
        load = ask(found.session, Loads).load
    except NotSupported as reason:
        found.missing.append(f"the step's own gradients, moments and update: its step does not show them, and {reason}")
        return
    load(found.before)
    try:
        found.stepped = gradients_into(found.store, "stepped", found.session, found.batch)
    finally:
        load(found.after)


def _reports(session: Session, missing: list[str]) -> tuple[RankReport, ...]:
    try:
        return tuple(ask(session, ReportsRanks).rank_reports())
    except NotSupported as reason:
        missing.append(f"whether ranks keep the same weights: {reason}")
        return ()


def _try_checkpoint(found: Gathering) -> None:
    """Write a checkpoint and load it.

    If the session can load, run the steps that need it: later ones, and two in a row.
    """
    session, config, batch = found.session, found.config, found.batch
    before, after, missing = found.before, found.after, found.missing
    written = Changed(session, [])
    made = found.record, written.sums
    goes_on = before.step + 2 <= config.train.steps
    follows = Follows(session, config, batch, found.sums_before, missing) if goes_on else None

    def begun() -> None:
        written.note("a checkpoint was begun")
        if follows:
            follows.look()
            written.note("evaluation and sampling that follow the step")
            follows.once_begun()

    restored = follows.once_restored if follows and follows.may_restore() else None
    found.reloaded = round_trip(session, before, after, missing, found.store, begun, restored)
    found.changed.found |= written.found
    if isinstance(found.store, FolderStore) and found.store.ranks > 1:
        found.store.lend(ranks_of(session), "after/")
    if found.reloaded is not None:
        shown = Later()
        if found.ahead:
            shown = later_steps(session, config, batch, after, found.store, found.in_passing, missing)
        found.later, found.moved = shown.records, shown.moved
        in_turn = in_a_row(session, config, batch, before, after, made, found.sums_before, follows, missing)
        found.in_a_row = {**in_turn, **shown.compared}
        if found.ahead and after.step == 1:
            found.in_a_row |= left_out(session, config, batch, after, missing)


def _name_left_out(found: Gathering) -> None:
    """List the parts that a check during training leaves out."""
    found.missing.append("the checkpoint's round trip: a check during training does not load a state")
    found.missing.append("steps in a row, and one whose gradients are not shown: only `lockstep parity` makes them")
    found.missing.append("sampling: `lockstep parity` checks it, a check during training does not")
    found.missing.append("attention logits: `lockstep parity` checks them, a check during training does not")
    if found.config.train.accumulation > 1:
        found.missing.append("accumulation of micro-batches with different weights: `lockstep parity` checks it")
    if found.config.train.ranks > 1:
        found.missing.append("reduced gradients against each rank's own: a check during training does not compute them")
