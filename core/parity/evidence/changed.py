"""Record changes of the state by passes that must not change it."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.core.backend import NotSupported, Session
from lockstep.core.train.unchanged_state import UnchangedState


class Changed:
    """A record of changes of a session's state, by checksums. Without checksums, `missing` receives the reason.

    found: name of the operation → names of what it changed (`UnchangedState.changed`); empty for no change.
    """

    def __init__(self, session: Session, missing: list[str]) -> None:
        self.found: dict[str, tuple[str, ...]] = {}
        self._state: UnchangedState | None = None
        try:
            self._state = UnchangedState(session)
        except NotSupported as reason:
            missing.append(f"whether passes that only read change the state: {reason}")

    @property
    def sums(self) -> Mapping[str, float]:
        """Checksums of the state at the last examination; empty if the session shows none."""
        return {} if self._state is None else self._state.sums

    def note(self, what: str) -> None:
        """Record the changes since the last call, under the name of the operation that was run."""
        if self._state is not None:
            self.found[what] = self._state.changed()
