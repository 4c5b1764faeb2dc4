"""Follow up a check that disagreed: run the step again, find the cause, write a capsule.

The step is run again from the same state on the same batch. If it gives other bits, it is run a third time. If all
three runs differ, the message names random numbers or a race. If the third run has the bits of the first, it names
hardware or a race. If the second and third have the same bits, and the first has others, loading the state may have
reset something outside the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.core.backend import NotSupported, Session, State, in_words
from lockstep.core.capabilities import GivesEachItsOwn, Loads, ask, ranks_of
from lockstep.core.checkpoint.taken_over import require_taken_over
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.parity.diagnose.cause import OUTSIDE, decoded
from lockstep.core.parity.diagnose.recheck_rows import Judged, is_unnamed, rechecked
from lockstep.core.parity.diagnose.same_bits import different
from lockstep.core.parity.evidence.capsule import write_capsule
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.in_a_row import TAPS
from lockstep.core.parity.evidence.into_store import state_into
from lockstep.core.parity.evidence.place import of_all_ranks, store_for
from lockstep.core.parity.evidence.store import Store
from lockstep.core.parity.measures.verdict import Check, Finding
from lockstep.core.run.ranks import Ranks, is_sharded

NAMED = 5
# Number of micro-batches, or pairs of sequences, that the reference repeats after an alarm in training.
MOST_SHOWN_AGAIN = 4
RANDOM = "random numbers that no state holds, such as those of dropout that was left on, or a race"
HOW_TO_TELL = "run the same steps again: what recurs at the same step with the same bits is no hardware"


@dataclass(frozen=True)
class Repeat:
    """A step that was run again.

    happened: whether the same result occurred; None if the step could not be run.
    differed: names of results with other bits, in the order of the chain.
    why: the outcome in words.
    """

    happened: bool | None
    differed: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Alarm:
    """The report on a check that disagreed.

    summary: one line.
    repeated: as `Repeat.happened`.
    capsule: its folder, or None if it could not be written.
    cause: sentences about the cause.
    differed: as `Repeat.differed`.
    problem: the reason why there is no capsule.
    """

    summary: str
    repeated: bool | None
    capsule: Path | None
    cause: tuple[str, ...]
    differed: tuple[str, ...] = ()
    problem: str = ""


def sound(
    session: Session,
    evidence: Evidence,
    check: Check,
    config: RunConfig,
    folder: Path,
    *,
    candidate: str,
    reference: str,
    versions: Mapping[str, str],
    machine: Mapping[str, Any] | None = None,
    judge_again: Callable[[Evidence], Check] | None = None,
    find_cause: Callable[[Evidence, Check], str | None] | None = None,
) -> Alarm:
    """Run the flagged step again, find its cause if it repeats, and write its capsule into `folder`.

    session: the candidate's session. Its state is restored bit for bit.
    judge_again: judges the evidence of the second run if its bits differ. Sums of a candidate may vary from run to run,
    and the result may still be wrong each time.
    find_cause: returns the cause in words (core/parity/diagnose/cause.py). Called unless the fault is known not to
    repeat.

    Every rank of a session calls it, and rank 0 writes the capsule. An error in writing the capsule is not raised, but
    is part of the alarm. Raises UserError if the session does not load its own state, because training could not
    continue from it.
    """
    ranks = ranks_of(session)
    # On every rank, the next steps depend on rank 0's result. When rank 0 writes the capsule, no rank reads the
    # evidence any more.
    repeat = ranks.gather(repeated(session, evidence, check, config, judge_again), "`run the step again`")[0]
    cause = [repeat.why]
    if repeat.happened is not False and find_cause is not None:
        words = find_cause(evidence, check)
        cause += [words] if words else []
    if (note := decoded(check)) and not any(note in words for words in cause):
        cause.append(note)

    def packed() -> tuple[Path | None, str]:
        try:
            told = replace(check, cause="; ".join(cause))
            return write_capsule(folder, evidence, told, config, candidate, reference, versions, machine), ""
        except UserError as error:
            return None, str(error)

    capsule, problem = ranks.of_first(packed)
    kept = f"packed in {capsule}" if capsule else f"no capsule: {problem}"
    summary = f"step {check.step}: {_place(check.origin)}; {'; '.join(cause)}; {kept}"
    return Alarm(summary, repeat.happened, capsule, tuple(cause), repeat.differed, problem)


def named(
    session: Session, evidence: Evidence, check: Check, config: RunConfig, judged: Judged
) -> tuple[Evidence, Check]:
    """Find the stage of an error that a check in training shows only end to end (`recheck_rows`).

    judged: called on rank 0.
    Every rank calls this function. The session's state is restored. Raises UserError if the session does not load it.
    If the search is not possible, evidence and check are returned unchanged.
    """
    if not is_unnamed(check, evidence):
        return evidence, check
    with ExitStack() as stack:
        try:
            now = _state_into(stack.enter_context(store_for(config, ranks_of(session))), session, config)
        except UserError:  # the disk is full: the check keeps its verdict
            return evidence, check
        try:
            return rechecked(session, config, evidence, check, judged, MOST_SHOWN_AGAIN)
        finally:
            _put_back(session, now, config)


def repeated(
    session: Session,
    evidence: Evidence,
    check: Check,
    config: RunConfig,
    judge_again: Callable[[Evidence], Check] | None = None,
) -> Repeat:
    """Run the same step again, and compare its results bit by bit. The session's state is restored.

    If the bits differ, and it is not wrong at the same place, it is run a third time (`OUTSIDE`, `RANDOM`).
    """
    ranks = ranks_of(session)
    with ExitStack() as stack:
        try:
            kept = stack.enter_context(store_for(config, ranks))
            now = _state_into(kept, session, config)
        except UserError as full:
            return _not_run_again(full)
        again = _run_again(session, evidence, config, now, stack)
        if isinstance(again, Exception):
            return _not_run_again(again)
        try:
            differed = ranks.of_first(lambda: tuple(different(evidence, again)))
        except UserError as lost:
            return _not_run_again(lost)
        if not differed:
            return Repeat(True, (), "the same step, run again, gives the same bits")
        many = f" and {len(differed) - NAMED} more" if len(differed) > NAMED else ""
        named = f"{', '.join(differed[:NAMED])}{many}"
        second = judge_again(again) if judge_again else None
        if second is not None and _same_origin(check, second):
            return Repeat(True, differed, f"repeats, though not bit for bit: sums vary from run to run ({named})")
        third = _run_again(session, evidence, config, now, stack)
        alike = _same_bits(again, third, ranks)
        by_chance = not alike and _same_bits(evidence, third, ranks) is False
    if alike:
        gives = f"run again twice, it gives the same bits twice, and differs from the run in {named}"
        return Repeat(
            False, differed, f"does not repeat from its state: {gives}; as it ran, it {OUTSIDE}; {HOW_TO_TELL}"
        )
    if by_chance:
        gives = "three runs of the same step give three results, which differ in"
        return Repeat(False, differed, f"does not repeat: {RANDOM}; {gives} {named}")
    return Repeat(False, differed, f"does not repeat: hardware or a race; the same step, run again, differs in {named}")


def _same_bits(one: Evidence, other: Evidence | Exception, ranks: Ranks) -> bool | None:
    """Return whether two runs of a step gave the same bits; None if one did not run, or if its evidence is lost."""
    if isinstance(other, Exception):
        return None
    try:
        return ranks.of_first(lambda: not any(different(one, other)))
    except UserError:
        return None


def _run_again(
    session: Session, evidence: Evidence, config: RunConfig, now: State, stack: ExitStack
) -> Evidence | Exception:
    """Return the evidence of the step from the state before it, or the error. The state `now` is restored.

    stack: keeps the evidence until it is closed.
    Raises UserError if the session does not load its own state.
    """
    ranks = ranks_of(session)
    try:
        ask(session, Loads).load(evidence.before)
        require_taken_over(session, config, evidence.before, "the state before the step")
    except NotSupported as reason:
        return reason
    except UserError as lost:
        _put_back(session, now, config)
        return lost
    try:
        store = stack.enter_context(store_for(config, ranks))
        probe, norms, tapped = evidence.given_probe, evidence.given_norms, evidence.given_tapped
        again = gather(session, config, evidence.batch, probe, norms, evidence.due, tapped, store)
        return of_all_ranks(again, store, ranks)
    except Exception as error:  # a candidate is foreign code, and training continues after an alarm
        return error
    finally:
        _put_back(session, now, config)


def _not_run_again(why: Exception) -> Repeat:
    return Repeat(None, (), f"the step could not be run again: {in_words(why)}")


def _own(session: Session, config: RunConfig) -> AbstractContextManager[None]:
    """Return a context in which a sharded session gives each rank the rows that it holds."""
    return ask(session, GivesEachItsOwn).each_its_own() if is_sharded(config) else nullcontext()


def _state_into(store: Store, session: Session, config: RunConfig) -> State:
    """Store the session's state as "now", and return it. Each rank stores the part that it holds."""
    with _own(session, config):
        return state_into(store, "now", session)


def _put_back(session: Session, state: State, config: RunConfig) -> None:
    """Load the session's own state and verify it. Raises UserError if it differs."""
    session.load(state)
    require_taken_over(session, config, state, "its state before the step was run again")


def _same_origin(one: Check, other: Check) -> bool:
    a, b = one.origin, other.origin
    if a is None or b is None or (a.tap in TAPS.values()) != (b.tap in TAPS.values()):
        return False
    return (a.stage, a.phase, a.layer) == (b.stage, b.phase, b.layer)


def _place(origin: Finding | None) -> str:
    if origin is None:
        return "no origin"
    layer = "" if origin.layer is None else f", layer {origin.layer}"
    return f"{origin.stage} ({origin.phase}{layer}) at {origin.tap}"
