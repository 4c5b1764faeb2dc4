"""Make a step that is not finite, as may occur in a run, and compare what a session reports and what it changes.

A finite step does not show whether a session treats NaN as 0, changes its weights anyway, or fails to count skipped
steps. Here one gain of the state is NaN, so the loss and all gradients are NaN too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from lockstep.core.arrays import Scaled
from lockstep.core.backend import Batch, NotSupported, Session, State, in_words
from lockstep.core.capabilities import Loads, ShowsChecksums, ask, ranks_of
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.names import groups_of
from lockstep.core.parity.evidence.in_a_row import LEFT_OUT, OF_MODEL, on_any
from lockstep.core.train.finite import NotFinite, is_finite
from lockstep.core.train.skipped_steps import leaves_out, scalars_after
from lockstep.core.train.unchanged_state import differing

WHAT = "a step that is not finite"


def left_out(
    session: Session, config: RunConfig, batch: Batch, after: State, missing: list[str]
) -> dict[str, tuple[str, ...]]:
    """Make the step with a gain of NaN. Returns LEFT_OUT → names of what is wrong.

    The names are finite fields of its record, and arrays and counts of the state that differ from those after a skipped
    step; with several ranks, with the rank. Nothing is returned if the session makes the step, reports that it is not
    finite, and the run does not require a skip.
    after: the state after the step, which the session has again at the end.
    missing: receives, in words, what could not be done.
    Every rank calls it.
    """
    load, ranks = ask(session, Loads).load, ranks_of(session)
    gain = next((name for name, group in groups_of(config.model).items() if group == "gains"), None)
    if gain is None:
        return {}
    try:
        load(replace(after, params=Scaled(after.params, np.nan, prefix=gain)))
        wrong = _wrong(session, config, batch, after, missing)
    except Exception as reason:
        # As in later steps (core/parity/evidence/later_steps.py).
        if config.train.ranks > 1 and not isinstance(reason, NotSupported):
            raise
        missing.append(f"{WHAT}: {in_words(reason)}")
        wrong = None
    load(after)
    on_all = on_any(ranks, wrong or ())
    return {} if wrong is None else {LEFT_OUT: on_all}


def _wrong(
    session: Session, config: RunConfig, batch: Batch, after: State, missing: list[str]
) -> tuple[str, ...] | None:
    sums: Mapping[str, float] = {}
    try:
        sums = ask(session, ShowsChecksums).state_checksums()
    except NotSupported as reason:
        missing.append(f"whether {WHAT} changes the state: {reason}")
    try:
        record = session.step(batch)
        told = is_finite(record)
    except NotFinite as error:
        record, told = error.record, True
    hidden = tuple(name for name in OF_MODEL if math.isfinite(getattr(record, name)))
    if hidden or not sums:
        return hidden
    if not told and not leaves_out(config):
        missing.append(f"leaving out {WHAT}: the session makes it; its record has loss {record.loss:g}")
        return None
    due = dict(sums)
    if leaves_out(config):
        scalars = {name: sums[name] for name in after.scalars if name in sums}
        due |= {"step": after.step + 1, **scalars_after(config, scalars, made=False)}
    return differing(due, ask(session, ShowsChecksums).state_checksums())
