"""A watcher of a library's loop, which may create its optimizer after the user created the watcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lockstep.core.errors import UserError
from lockstep.core.parity.measures.verdict import Outcome
from lockstep.core.parity.watch.api import Watcher
from lockstep.core.parity.watch.uncovered import WatchCheck

NOT_BEGUN = "could_not in 0 checks; training has not started"


class LibraryWatcher:
    """A watcher that is complete when training begins; its results are those of the last run that began."""

    def __init__(self, watcher: Watcher | None = None) -> None:
        self.watcher = watcher

    @property
    def verdict(self) -> Outcome:
        """The value of `Watcher.verdict`; `could_not` before training."""
        return self.watcher.verdict if self.watcher else "could_not"

    @property
    def headline(self) -> str:
        """The value of `Watcher.headline`."""
        return self.watcher.headline if self.watcher else NOT_BEGUN

    @property
    def checks(self) -> Sequence[WatchCheck]:
        """Every check so far, in order."""
        return self.watcher.checks if self.watcher else ()

    def to_json(self) -> dict[str, Any]:
        """Return `Watcher.to_json`. Raises UserError before training."""
        if self.watcher is None:
            raise UserError("training has not started: there is no check to save")
        return self.watcher.to_json()

    def __str__(self) -> str:
        return str(self.watcher) if self.watcher else NOT_BEGUN


def replace_on(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method on one object, not on its class. Returns a function that restores it."""
    stood = vars(owner).get(name)
    setattr(owner, name, method)

    def put_back() -> None:
        if stood is None:
            delattr(owner, name)
        else:
            setattr(owner, name, stood)

    return put_back
