"""Check that operations which only read a session do not change its state: validation, samples, checkpoints, checks.

For example, a session may validate with averaged weights and keep them, or cast its weights to write them. Then it
continues from another state than its steps have produced. A check of a step cannot find this, because it begins with
the current state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lockstep.core.backend import NotSupported, Session
from lockstep.core.capabilities import ShowsChecksums, ask, ranks_of
from lockstep.core.errors import UserError

NAMED = 3


class StateChanged(UserError):
    """An error: an operation that must only read a session has changed its state."""


class UnchangedState:
    """A detector of changes in a session's state since the last call. Every rank of the session calls it.

    Raises NotSupported if the session has no checksums.
    """

    def __init__(self, session: Session) -> None:
        self._shown, self._ranks = ask(session, ShowsChecksums), ranks_of(session)
        self._sums = self._shown.state_checksums()

    @property
    def sums(self) -> Mapping[str, float]:
        """The checksums of this rank's part of the state at the last call."""
        return self._sums

    def changed(self) -> tuple[str, ...]:
        """Return the names of tensors that changed since the last call, the same list on every rank.

        With several ranks, each name has the rank.
        """
        before, self._sums = self._sums, self._shown.state_checksums()
        found = self._ranks.gather(differing(before, self._sums), "`compare the state with what it was`")
        if self._ranks.count == 1:
            return tuple(found[0])
        return tuple(f"{name} on rank {rank}" for rank, names in enumerate(found) for name in names)


def differing(before: Mapping[str, object], after: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of checksums that differ, or that only one side has."""
    names = dict.fromkeys((*before, *after))
    return tuple(name for name in names if before.get(name) != after.get(name))


@contextmanager
def unchanged(session: Session, what: str) -> Iterator[None]:
    """Check that the context does not change the session's state, if the session has checksums.

    what: the operation, for messages. Raises StateChanged on every rank.
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
            f"{what} changed the session's state, which only steps may change: {', '.join(names[:NAMED])}{more}; "
            "its later results do not follow from its steps alone"
        )
