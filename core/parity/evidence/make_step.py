"""Make the checked step, and keep what it shows."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from lockstep.core.backend import StepRecord
from lockstep.core.parity.evidence.amaxes import amaxes_of_pass
from lockstep.core.parity.evidence.gathering import Gathering
from lockstep.core.parity.evidence.into_store import gradients_into, gradients_of
from lockstep.core.parity.evidence.store import Store
from lockstep.core.streams import StreamStep
from lockstep.core.train.finite import NotFinite
from lockstep.core.train.metrics import has_norms


class _Keeping:
    """A function that puts a step's gradients into a store. `seconds` is the time that this takes."""

    def __init__(self, store: Store) -> None:
        self.seconds = 0.0
        self._store = store

    def __call__(self, kind: str, name: str, array: np.ndarray) -> None:
        began = time.perf_counter()
        self._store.put(f"stepped/{kind}", name, array)
        self.seconds += time.perf_counter() - began


def make_step(found: Gathering, norms: bool) -> None:
    """Make the step, and keep its record, its amaxes, and its gradients if it shows them. norms: as in `gather`.

    The session skips a step that is not finite, and returns a record of it too.
    """
    session, batch, keep = found.session, found.batch, _Keeping(found.store)
    if found.shows_parts is not None:
        found.shows_parts.keep_parts()
    started = time.perf_counter()
    try:
        if found.in_passing is not None:
            record = _showing(found, found.in_passing, keep, norms)
        else:
            record = session.step(batch, norms=True) if norms else session.step(batch)
    except NotFinite as left_out:
        record, found.not_finite = left_out.record, left_out.where
        if found.in_passing is not None:
            found.stepped = gradients_into(found.store, "stepped again", session, batch)
    if norms and not found.not_finite and not has_norms(record.metrics):
        found.missing.append("the record's norms by group: the session's step gives none")
    # The step's time excludes the time to store its gradients.
    found.record = replace(record, seconds=time.perf_counter() - started - keep.seconds)
    found.seconds += keep.seconds
    if not found.not_finite:
        found.step_amaxes = amaxes_of_pass(session, found.config, [])


def _showing(found: Gathering, step: StreamStep, keep: _Keeping, norms: bool) -> StepRecord:
    """Make the step with its gradients shown. Returns its record."""
    record, shown = step(found.batch, keep, norms)
    if shown is not None:
        found.stepped = gradients_of(found.store, "stepped", shown)
    elif not found.thorough:
        found.missing.append("the step's own gradients, moments and update: the session's step did not show them")
    return record
