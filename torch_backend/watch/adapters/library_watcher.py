"""A watcher of a library's loop, which may make its optimizer after the user asked for the watcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lockstep.core.errors import UserError
from lockstep.core.parity.measures.verdict import Outcome
from lockstep.core.parity.watch.api import Watcher
from lockstep.core.parity.watch.uncovered import WatchCheck

NOT_BEGUN = "could_not in 0 checks; training has not begun"


class LibraryWatcher:
    """The watcher of the run that began last: `verdict`, `headline`, `checks`, `to_json()` are its own."""

    def __init__(self, watcher: Watcher | None = None) -> None:
        self.watcher = watcher

    @property
    def verdict(self) -> Outcome:
        """The verdict of `Watcher.verdict`; `could_not` before training."""
        return self.watcher.verdict if self.watcher else "could_not"

    @property
    def headline(self) -> str:
        """The line of `Watcher.headline`."""
        return self.watcher.headline if self.watcher else NOT_BEGUN

    @property
    def checks(self) -> Sequence[WatchCheck]:
        """Every check so far, in order."""
        return self.watcher.checks if self.watcher else ()

    def to_json(self) -> dict[str, Any]:
        """Return `Watcher.to_json`. Raises UserError before training."""
        if self.watcher is None:
            raise UserError("training has not begun: there is no check to write down")
        return self.watcher.to_json()

    def __str__(self) -> str:
        return str(self.watcher) if self.watcher else NOT_BEGUN


def replace_on(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method on this object alone. Returns a function that restores it."""
    stood = vars(owner).get(name)
    setattr(owner, name, method)

    def put_back() -> None:
        if stood is None:
            delattr(owner, name)
        else:
            setattr(owner, name, stood)

    return put_back
