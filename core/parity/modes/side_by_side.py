"""Run candidate and reference step by step. Every step is judged from the candidate's own state."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

from lockstep.core.backend import Backend, Batch, NotSupported, Session
from lockstep.core.capabilities import Candidate, ask, ranks_of
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.parity.diagnose.fitting import with_fitting
from lockstep.core.parity.diagnose.recheck_rows import recheck_rows
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.place import (
    is_large,
    of_all_ranks,
    return_freed_memory,
    return_large_blocks,
    store_for,
)
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.measures.compare import Reference
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.parity.reference.prepare import prepare
from lockstep.core.parity.reference.self_check import self_checked
from lockstep.core.plan.checks import require_budget

Alarmed = Callable[[Session, Evidence, Check], Check]


def check_steps(
    candidate: Backend,
    reference: Backend,
    config: RunConfig,
    batches: Iterable[Batch],
    alarm: Alarmed = lambda session, evidence, check: check,
    gathered: Callable[[int, float], object] = lambda step, seconds: None,
) -> Iterator[Check]:
    """Check each of the candidate's first steps, on these batches.

    Before each judgement the reference loads the candidate's state, so every check judges a single step.
    alarm: handles a check that disagreed and returns it (core/parity/diagnose/disagreement.py). `alarm` must restore
    the session's state.
    gathered: called with each step before its judgement, and the seconds of its passes.
    Raises UserError if the candidate lacks a required method, or if a check exceeds the run's budgets.
    """
    require_budget(config, thorough=True)
    return_large_blocks(config)
    with ExitStack() as stack:
        session = candidate.open(config)
        try:
            ask(session, Candidate)
        except NotSupported as lacking:
            raise UserError(
                f"{lacking}: docs/guide/candidates.md lists what a candidate's session needs; "
                "what it cannot do may raise lockstep.core.backend.NotSupported"
            ) from lacking
        stack.callback(session.close)
        ranks = ranks_of(session)
        coming = iter(batches)
        first = list(itertools.islice(coming, 1))
        opened = stack.enter_context(_opening(reference, config, first))
        # Other plans of casts are tried on the first check that disagrees.
        fitted = False
        for number, batch in enumerate(itertools.chain(first, coming), 1):
            with store_for(config, ranks) as store:
                began = time.perf_counter()
                evidence = gather(session, config, batch, norms=records_norms(session, config, number), store=store)
                evidence = of_all_ranks(evidence, store, ranks)
                if is_large(config):
                    return_freed_memory()
                gathered(evidence.record.step, time.perf_counter() - began)
                references = opened()
                evidence, check = recheck_rows(session, config, evidence, judge(evidence, references), references)
                if check.verdict == "disagreed":
                    if not fitted:
                        check = with_fitting(check, evidence, references, reference)
                        fitted = True
                    check = alarm(session, evidence, check)
            yield check


def records_norms(session: Session, config: RunConfig, number: int) -> bool:
    """Return whether the check of this number records norms by group, if the session has any: every second one does.

    Some steps of training record them too, and this may be another program.
    """
    return number % 2 == 0 and config.log.norms_every > 0 and "norms" in inspect.signature(session.step).parameters


@contextmanager
def _opening(backend: Backend, config: RunConfig, first: Sequence[Batch]) -> Iterator[Callable[[], Reference]]:
    """Open the reference and run its self-check, in a second thread if it can be called from several.

    Then compile its programs for batches like `first`. Yields a function that waits for all this and returns the
    reference; it raises UserError if the self-check fails. An error of opening is raised at once.
    """
    with closing(Reference.open(backend, config)) as opened:
        if not opened.threads:
            references = self_checked(opened, backend).over_a_run()
            yield lambda: references
            return

        def ready() -> Reference:
            checked = self_checked(opened, backend).over_a_run()
            for batch in first:
                prepare(checked, batch)
            return checked

        with ThreadPoolExecutor(1, thread_name_prefix="lockstep-reference") as thread:
            yield thread.submit(ready).result
