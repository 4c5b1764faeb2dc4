"""Check that operations which only read a session leave its state alone: validation, samples, checkpoints, and checks.

A session that validates on averaged weights and keeps them, or casts its weights to write them, trains on from another
state than its steps have made. No check sees that: each begins from the state that it finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lockstep.core.backend import NotSupported, Session
from lockstep.core.capabilities import ShowsChecksums, ask, ranks_of
from lockstep.core.errors import UserError

NAMED = 3


class StateChanged(UserError):
    """An error: an operation that only reads a session has changed its state."""


class UnchangedState:
    """A detector of changes in a session's state since the last call. Every rank of the session calls it.

    Raises NotSupported where the session shows no checksums.
    """

    def __init__(self, session: Session) -> None:
        self._shown, self._ranks = ask(session, ShowsChecksums), ranks_of(session)
        self._sums = self._shown.state_checksums()

    @property
    def sums(self) -> Mapping[str, float]:
        """Checksums of the state at the last call, of what this rank holds."""
        return self._sums

    def changed(self) -> tuple[str, ...]:
        """Name what differs from the state at the last call, of several ranks with the rank; the same on each."""
        before, self._sums = self._sums, self._shown.state_checksums()
        found = self._ranks.gather(differing(before, self._sums), "`compare the state with what it was`")
        if self._ranks.count == 1:
            return tuple(found[0])
        return tuple(f"{name} on rank {rank}" for rank, names in enumerate(found) for name in names)


def differing(before: Mapping[str, object], after: Mapping[str, object]) -> tuple[str, ...]:
    """Name the checksums that differ, and those that only one side has."""
    names = dict.fromkeys((*before, *after))
    return tuple(name for name in names if before.get(name) != after.get(name))


@contextmanager
def unchanged(session: Session, what: str) -> Iterator[None]:
    """Check that the block leaves the session's state as it is, where the session shows checksums.

    what: that, in words. Raises StateChanged on every rank.
    """
    try:
        state = UnchangedState(session)
    except NotSupported:
        yield
        return
    yield
    if names := state.changed():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        raise StateChanged(
            f"{what} changed the session's state, which only steps may: {', '.join(names[:NAMED])}{more}; what it does "
            "after this is not what its steps have made"
        )
