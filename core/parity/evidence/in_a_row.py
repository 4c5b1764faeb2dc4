"""Two steps in a row as training makes them, which no check is between, held to the same two with a check between them.

Whatever a check does is itself something that happens between two steps: it computes gradients, which may clear what a
step leaves behind, it shows a step, and at its end it loads a state, which may make anew what was outdated. A session
that depends on what lies outside its state (a copy of weights that only a load makes anew, gradients that only other
passes clear, a buffer of old gradients) is wrong in every run and right in every check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from lockstep.core.backend import Batch, NotSupported, Session, State, StepRecord, in_words
from lockstep.core.capabilities import Loads, ShowsChecksums, ask, ranks_of
from lockstep.core.config.schema import RunConfig
from lockstep.core.data.memory import available_memory_bytes
from lockstep.core.model.budget import parameter_count
from lockstep.core.run.ranks import Ranks
from lockstep.core.train.finite import NotFinite
from lockstep.core.train.unchanged_state import differing

# Keys of the result of `in_a_row`: the four comparisons.
LOADED, NOT_SHOWN, AT_ONCE, WHILE_WRITTEN = "loaded", "not shown", "at once", "while written"
# The taps of what `in_a_row` finds of steps.
TAPS = {
    NOT_SHOWN: "the step again, not shown",
    AT_ONCE: "the step after, at once",
    WHILE_WRITTEN: "the step after, while a checkpoint is written",
}
# Fields of a record that are the step's arithmetic, in its order.
ARITHMETIC = ("loss", "grad_norm", "clip_coefficient", "lr")
ON_RANK = " on rank "
WHAT = "two steps in a row"
# A step takes the gradients' memory beside a checkpoint's copy of the state; as much again is left free.
MEMORY_OF_STEP = 2

Sums = Mapping[str, float]


@dataclass(frozen=True)
class Made:
    """A step that was made, with the checksums of the state after it where they were asked for."""

    record: StepRecord
    sums: Sums

    def differs_from(self, other: Made) -> tuple[str, ...]:
        """Name what differs: fields of the record, then arrays of the state."""
        ours, theirs = ({name: repr(getattr(one.record, name)) for name in ARITHMETIC} for one in (self, other))
        return (*(name for name in ARITHMETIC if ours[name] != theirs[name]), *differing(self.sums, other.sums))


def while_written(
    session: Session, config: RunConfig, batch: Batch, before: State, started: Sums, missing: list[str]
) -> Made | None:
    """Make the step after the one that is checked, as training does while a checkpoint is being written.

    The session has begun to write the state after the step, and has it. started: as `in_a_row` takes it. Return None,
    and a word in `missing`, where the run ends with the step, or memory does not hold a step beside the checkpoint's
    copy of the state. The session has the state after that next step at the end.
    """
    what = "a step while a checkpoint is written"
    if before.step + 2 > config.train.steps:
        return None
    if available_memory_bytes() < MEMORY_OF_STEP * np.dtype(np.float32).itemsize * parameter_count(config.model):
        missing.append(f"{what}: the gradients' memory is not free beside the checkpoint's copy of the state")
        return None
    try:
        return Made(_step(session, batch), _sums(session, started))
    except Exception as reason:  # as in `in_a_row`
        missing.append(f"{what}: {in_words(reason)}")
        return None


def _sums(session: Session, started: Sums) -> Sums:
    """Return checksums of the session's state, where it told some before."""
    return ask(session, ShowsChecksums).state_checksums() if started else {}


def in_a_row(
    session: Session,
    config: RunConfig,
    batch: Batch,
    before: State,
    after: State,
    shown: tuple[StepRecord, Sums],
    started: Sums,
    written: Made | None,
    missing: list[str],
) -> Mapping[str, tuple[str, ...]]:
    """Make the step and the next one, of the same batch, at once; and again with what a check does between them.

    shown: record of the step as the check made it, and checksums of the state after it. started: of that before it.
    Checksums are empty where the session tells none; records are compared then. written: what `while_written` made.
    The session has `after` again at the end.

    Return the names of what differs: LOADED from `before` when that was loaded; NOT_SHOWN of the step, made without
    showing anything, from the one that was shown; AT_ONCE of the second step from the same one after a pass for
    gradients and a load; WHILE_WRITTEN of that one from `written`. Nothing, and a word in `missing`, where steps do not
    repeat their bits, or cannot be made. Every rank of a session calls it with its own states and checksums; the names
    are the same on each.
    """
    try:
        load = ask(session, Loads).load
    except NotSupported as reason:
        missing.append(f"{WHAT}: {reason}")
        return {}
    if before.step + 2 > config.train.steps:
        missing.append(f"{WHAT}: the run ends with this one")
        return {}

    def sums() -> Sums:
        return _sums(session, started)

    def at_once() -> Made:
        load(before)
        _step(session, batch)
        return Made(_step(session, batch), sums())

    def with_a_check_between() -> tuple[Sums, Made, Made]:
        load(before)
        loaded = sums()
        first = Made(_step(session, batch), sums())
        with suppress(NotSupported):
            session.gradients(batch.cut(config.train)[0])
        load(after)
        return loaded, first, Made(_step(session, batch), sums())

    try:
        ranks = ranks_of(session)
        return _compared(started, Made(*shown), written, at_once, with_a_check_between, missing, ranks)
    except Exception as reason:
        # The step that was made keeps its verdict, also if one that the run has not come to fails. Among several ranks
        # the others wait for the one that failed, so none can go on.
        if config.train.ranks > 1 and not isinstance(reason, NotSupported):
            raise
        missing.append(f"{WHAT}: {in_words(reason)}")
        return {}
    finally:
        load(after)


def _compared(
    started: Sums,
    shown: Made,
    written: Made | None,
    at_once: Callable[[], Made],
    with_a_check_between: Callable[[], tuple[Sums, Made, Made]],
    missing: list[str],
    ranks: Ranks,
) -> dict[str, tuple[str, ...]]:
    second = at_once()
    loaded, first, apart = with_a_check_between()
    found = {
        LOADED: _on_any(ranks, differing(started, loaded)),
        NOT_SHOWN: _on_any(ranks, first.differs_from(shown)),
        AT_ONCE: _on_any(ranks, second.differs_from(apart)),
    }
    if written is not None:
        found[WHILE_WRITTEN] = written.differs_from(apart)
    if not found[LOADED] and any(found.values()):
        # Some programs do not repeat their bits. What is accused is there again, alike in every bit.
        _, first_again, apart_again = with_a_check_between()
        again = second, at_once(), first, first_again, apart, apart_again
        pairs = zip(again[::2], again[1::2], strict=True)
        if _on_any(ranks, tuple(name for one, other in pairs for name in one.differs_from(other))):
            missing.append(f"{WHAT}: the session's steps do not repeat their bits")
            return {}
    return found


def _on_any(ranks: Ranks, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return what differs on rank 0, then what differs on another rank alone; the same on every rank."""
    first, *others = ranks.gather(names, "`compare two steps in a row`")
    alone: dict[str, int] = {}
    for rank, of_rank in enumerate(others, 1):
        for name in of_rank:
            alone.setdefault(name, rank)
    return (*first, *(f"{name}{ON_RANK}{rank}" for name, rank in alone.items() if name not in first))


def _step(session: Session, batch: Batch) -> StepRecord:
    """Make a step; one that is not finite is left out, and has a record too."""
    try:
        return session.step(batch)
    except NotFinite as found:
        return found.record
