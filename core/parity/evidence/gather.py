"""Gather the evidence of one step from a candidate's session; it is judged elsewhere and later.

Gathering never needs the reference and judging never needs the candidate, so the same evidence serves a check side by
side (`lockstep parity`) and one in a worker process (`lockstep train --parity.every N`).
"""

from __future__ import annotations

import time
from contextlib import nullcontext

from lockstep.core.backend import Batch, Session
from lockstep.core.capabilities import GivesEachItsOwn, ask
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence.after_step import after_step, validate
from lockstep.core.parity.evidence.before_step import before_step
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.gathering import begin
from lockstep.core.parity.evidence.make_step import make_step
from lockstep.core.parity.evidence.read_back import reading_back
from lockstep.core.parity.evidence.store import MemoryStore, Store
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
    ahead: bool = True,
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
    ahead: whether a thorough check of a run's first step also makes it as later ones. It then finds what begins later,
    which is not wanted in a search for a fault's first step.

    Into a store of several ranks each rank puts what it holds, and its evidence is as much: `place.of_all_ranks`.

    Raises whatever the session and the store raise, except NotSupported, which is listed as not covered, and NotFinite:
    such a step is judged like any other.
    """
    into = MemoryStore() if store is None else store
    shown = ask(session, GivesEachItsOwn).each_its_own() if into.ranks > 1 else nullcontext()
    with shown:
        started = time.perf_counter()
        found = begin(session, config, batch, probe, tapped, into, ahead)
        before_step(found)
        found.seconds = time.perf_counter() - started
        # The cost of gathering excludes the step and its validation.
        read_back = reading_back(session, found.missing)
        make_step(found, norms)
        if validation is not None and not found.not_finite:
            validate(found, validation)
        started = time.perf_counter()
        found.misread = read_back(batch)
        after_step(found)
        found.seconds += time.perf_counter() - started
        return found.evidence(due)
