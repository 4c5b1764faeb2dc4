"""The checkpoint's round trip in a thorough check: write the state after the step, read it, load it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from lockstep.core.backend import NotSupported, Session, State
from lockstep.core.capabilities import Loads, Restores, ShowsChecksums, ask, ranks_of
from lockstep.core.checkpoint.format import begin_checkpoint, reader_of, restore_checkpoint
from lockstep.core.checkpoint.of_ranks import begin_on_all, part_of, write_part
from lockstep.core.checkpoint.reader import opened_checkpoint
from lockstep.core.checkpoint.taken_over import miscounted
from lockstep.core.parity.evidence.into_store import state_into
from lockstep.core.parity.evidence.store import Store
from lockstep.core.train.unchanged_state import differing


def round_trip(
    session: Session,
    before: State,
    after: State,
    missing: list[str],
    store: Store,
    begun: Callable[[], None],
    restored: Callable[[], None] | None = None,
) -> State | None:
    """Write the state after the step to a checkpoint, read it, load it into the session, and return it.

    The session loads another state while its checkpoint is being written, so the checkpoint must be of a copy.
    If the optimizer then counts other updates, the scalars of the result name them.
    begun: called before that load, when the session has copied the state to write.
    restored: called after a session that reads checkpoints itself (`Restores`) has read it. The state is then loaded as
    well.
    Every rank calls it.
    """
    try:
        load = ask(session, Loads).load
    except NotSupported as reason:
        missing.append(f"the checkpoint's round trip: {reason}")
        return None
    try:
        with (
            tempfile.TemporaryDirectory(prefix="lockstep-") as folder,
            _read_back(session, load, before, after.step, Path(folder) / "state", begun) as (written, loaded),
        ):
            if restored is not None:
                with suppress(NotSupported):
                    restore_checkpoint(written, ask(session, Restores).restore)
                    restored()
            load(loaded)
    except (NotSupported, ValueError, KeyError) as reason:  # the check itself reports wrong names
        missing.append(f"the checkpoint's round trip: the session does not load its own state: {reason}")
        return None
    reloaded = state_into(store, "reloaded", session)
    wrong = miscounted(session, reloaded.updates)
    return replace(reloaded, scalars={**reloaded.scalars, **dict.fromkeys(wrong, 1.0)})


def differs_once_read(session: Session, step: int, other: State) -> tuple[str, ...]:
    """Write the session's state and load the checkpoint.

    Returns the arrays of this rank that then differ, by checksums. step: number of the state's step.
    other: a state that the session loads while its checkpoint is being written.
    Raises NotSupported if the session shows no checksums.
    """
    load, checksums = ask(session, Loads).load, ask(session, ShowsChecksums).state_checksums
    sums = checksums()
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-") as folder,
        _read_back(session, load, other, step, Path(folder) / "state", lambda: None) as (_, loaded),
    ):
        load(loaded)
    return differing(sums, checksums())


@contextmanager
def _read_back(
    session: Session,
    load: Callable[[State], None],
    before: State,
    step: int,
    final: Path,
    begun: Callable[[], None],
) -> Iterator[tuple[Path, State]]:
    """Write a checkpoint. Yields its path and the state read from it, one tensor at a time on demand.

    Several ranks write it together, and each reads it separately.
    """
    ranks = ranks_of(session)
    if ranks.rank == 0:
        pending = begin_on_all(session, ranks, lambda write: begin_checkpoint(final, step, write, {}))
        begun()
        load(before)
        written = ranks.of_first(lambda: str(pending.commit()))
    else:
        writing = part_of(session, ranks)
        if writing is not None:
            begun()
            load(before)
            write_part(writing)
        written = ranks.of_first(str)
    with opened_checkpoint(Path(written), reader_of(session)) as state:
        yield Path(written), state
