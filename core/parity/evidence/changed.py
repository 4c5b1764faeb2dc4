"""Record changes of the state by passes that must not change it."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.core.backend import NotSupported, Session
from lockstep.core.train.unchanged_state import UnchangedState


class Changed:
    """A record of what changes in a session's state, by its checksums; without them, `missing` gets the reason.

    found: names of what differs (`UnchangedState.changed`), by what was done, also where nothing does.
    """

    def __init__(self, session: Session, missing: list[str]) -> None:
        self.found: dict[str, tuple[str, ...]] = {}
        self._state: UnchangedState | None = None
        try:
            self._state = UnchangedState(session)
        except NotSupported as reason:
            missing.append(f"whether passes that only look leave the state alone: {reason}")

    @property
    def sums(self) -> Mapping[str, float]:
        """Checksums of the state when it was last examined; empty where the session shows none."""
        return {} if self._state is None else self._state.sums

    def note(self, what: str) -> None:
        """Note what has changed since the last call, under the name of the operation that was run."""
        if self._state is not None:
            self.found[what] = self._state.changed()
