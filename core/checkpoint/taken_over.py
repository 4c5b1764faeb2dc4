"""Compare a session with the state that was loaded into it: both must be equal bit for bit.

A session that swaps two blocks while loading, loses a moment or miscounts its steps trains on without an error, and a
check begins from the state that the session reports. So every stored state that is loaded is compared with the
session's state, a tensor at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from lockstep.core.arrays import bit_equal, rows_of, shape_of
from lockstep.core.backend import Arrays, NotSupported, Session, State
from lockstep.core.capabilities import CountsUpdates, GivesEachItsOwn, Restores, ShowsState, ask, ranks_of
from lockstep.core.checkpoint.format import PARAMS
from lockstep.core.checkpoint.reader import Stored
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.run.ranks import Ranks, is_sharded, rows_of_rank
from lockstep.core.streams import stream_state
from lockstep.core.train.skipped_steps import own_scalars

NAMED = 3


def restore_state(
    session: Session, config: RunConfig, folder: Path, step: int, scalars: Mapping[str, float]
) -> str | None:
    """Restore a session from a checkpoint's folder that the session reads itself, and compare it with the folder.

    Every rank of the session calls it. Returns and raises as `require_taken_over`; raises what `restore` raises.
    """
    ask(session, Restores).restore(folder, step, scalars)
    return require_taken_over(session, config, Stored(folder).state(step, scalars), f"the checkpoint {folder}")


def require_taken_over(session: Session, config: RunConfig, given: State, source: str) -> str | None:
    """Compare what a session holds with the state that it was given; return why it could not be compared, or None.

    given: its tensors may be read as they are asked for (core/checkpoint/reader.py); of a tensor that is cut over ranks
    it holds the whole, or this rank's rows. source: what holds the state, in words. Every rank of the session calls it,
    and each compares what it holds by itself.

    Raises UserError on every rank if a weight, a moment, the step or a scalar differs on any of them.
    """
    ranks = ranks_of(session)
    wrong: list[str] = []
    unseen = None
    try:
        wrong = _differing(session, config, given, ranks)
    except NotSupported as reason:
        unseen = str(reason)
    for rank, found in enumerate(ranks.gather(wrong, "`compare the state that was taken over`")):
        if found:
            who = f"rank {rank}" if ranks.count > 1 else "the session"
            more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
            raise UserError(
                f"{who} did not take its state back: {', '.join(found[:NAMED])}{more} "
                f"{'differs' if len(found) == 1 else 'differ'} from {source}"
            )
    return unseen and f"the session's state could not be compared with {source}: {unseen}"


def _differing(session: Session, config: RunConfig, given: State, ranks: Ranks) -> list[str]:
    """Name the differences, in the session's order."""
    ask(session, ShowsState)
    kinds = {PARAMS: given.params, **given.optimizer}
    left = {(kind, name): None for kind, arrays in kinds.items() for name in arrays}
    wrong = []

    def take(kind: str, name: str, array: np.ndarray) -> None:
        is_given = (kind, name) in left
        left.pop((kind, name), None)
        if not is_given or not _holds(array, _given(kinds[kind], name, array.shape, ranks)):
            wrong.append(f"{kind}/{name}")

    with ExitStack() as stack:
        if is_sharded(config):
            with suppress(NotSupported):
                stack.enter_context(ask(session, GivesEachItsOwn).each_its_own())
        found = stream_state(session, take)
    wrong += [f"{kind}/{name}" for kind, name in left]
    if found.step != given.step:
        wrong.append(f"step ({found.step}, not {given.step})")
    due = own_scalars(config, given.scalars)
    for name in [name for name in due if name in given.scalars or name in found.scalars]:
        if found.scalars.get(name) != due[name]:
            wrong.append(f"{name} ({found.scalars.get(name)}, not {due[name]})")
    return wrong + miscounted(session, given.updates)


def _holds(shown: np.ndarray, given: np.ndarray) -> bool:
    """Return whether a session shows the given numbers, in their own format or in a wider one, which holds them all."""
    wider = shown.dtype != given.dtype and np.can_cast(given.dtype, shown.dtype)
    return bit_equal(shown, given.astype(shown.dtype) if wider else given)


def _given(arrays: Arrays, name: str, shown: tuple[int, ...], ranks: Ranks) -> np.ndarray:
    """Return the given tensor, or only a rank's rows of it if the session has only those."""
    shape = shape_of(arrays, name)
    if shape == shown or not shape:
        return arrays[name]
    return rows_of(arrays, name, rows_of_rank(shape[0], ranks.rank, ranks.count))


def miscounted(session: Session, updates: int) -> list[str]:
    """Name the parameters of which the optimizer has counted another number of updates."""
    try:
        counts = ask(session, CountsUpdates).update_counts()
    except NotSupported:
        return []
    return [f"the updates of {name} ({count}, not {updates})" for name, count in counts.items() if count != updates]
