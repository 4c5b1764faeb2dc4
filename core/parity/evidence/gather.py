"""Gather the evidence of one step from a candidate's session. Judging happens elsewhere or later.

Gathering does not need the reference, and judging does not need the candidate. So the same evidence serves a
side-by-side check (`lockstep parity`) and a check in a worker process (`lockstep train --parity.every N`).
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
    """Run one step of `session` on `batch` and keep all that a check needs.

    The step has the weights of its batch. A micro-batch with uneven weights is computed and its taps are read before
    the step.
    probe: None for a thorough check: the reference repeats the whole step, gradient accumulation is tested on
    micro-batches with uneven weights too, and the state is written to a checkpoint and loaded. Otherwise the result of
    `probe_batch` for a micro-batch; then only the step changes the session's state.
    norms: the step's record shall have norms by group.
    due: digest of the batch that the data order gives for this step.
    tapped: in a thorough check, the micro-batch whose stages are examined, from `probe_batch`. Default: the first one,
    with other sequences at every step.
    store: receives the tensors, one at a time. Default: a store in memory. `save_evidence` finishes a store in a
    folder.
    validation: the validation that is due after the step. The record then has its metrics.
    ahead: a thorough check of a run's first step also repeats the step as later ones, to find faults that begin later.
    A search for a fault's first step sets it to False.

    In a store of several ranks, each rank puts the tensors that it holds and returns the evidence of this part:
    `place.of_all_ranks` combines them.
    Raises the errors of session and store, except NotSupported, which is listed as not covered, and NotFinite, because
    a step that is not finite is judged like any other.
    """
    into = MemoryStore() if store is None else store
    shown = ask(session, GivesEachItsOwn).each_its_own() if into.ranks > 1 else nullcontext()
    with shown:
        started = time.perf_counter()
        found = begin(session, config, batch, probe, tapped, into, ahead)
        before_step(found)
        found.seconds = time.perf_counter() - started
        # The time of gathering excludes the step and its validation.
        read_back = reading_back(session, found.missing)
        make_step(found, norms)
        if validation is not None and not found.not_finite:
            validate(found, validation)
        started = time.perf_counter()
        found.misread = {**found.misread, **read_back(batch)}
        after_step(found)
        found.seconds += time.perf_counter() - started
        return found.evidence(due)
