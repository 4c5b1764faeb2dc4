"""Record what a check did not judge, and why. An error in a check never ends a training run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lockstep.core.errors import UserError
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.parity.watch.coverage import Coverage

log = logging.getLogger("lockstep.watch")


@dataclass(frozen=True)
class WatchCheck(Check):
    """A check made by `watch`.

    not_judged: links of the step that were not judged, each with its reason.
    operations: counts of judged operations (core/parity/watch/observed.py); None if operations are not judged.
    """

    not_judged: tuple[str, ...] = ()
    operations: Coverage | None = None

    def to_json(self) -> dict[str, Any]:
        """Extend `Check.to_json` with `not_judged` and `operations`."""
        counts = self.operations.to_json() if self.operations else None
        return super().to_json() | {"not_judged": list(self.not_judged), "operations": counts}


@dataclass
class Uncovered:
    """Links of the step that one check leaves out, with reasons.

    listed: texts for `not_covered` alone.
    skipped: link of the step → reasons why it is not judged.
    """

    listed: list[str] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)

    def append(self, text: str) -> None:
        """Add a text to `not_covered`, but not to the one-line verdict."""
        if text not in self.listed:
            self.listed.append(text)

    def skip(self, link: str, why: str) -> None:
        """Add a link that is not judged, and the reason, to the one-line verdict."""
        reasons = self.skipped.setdefault(link, [])
        if why not in reasons:
            reasons.append(why)

    def extend(self, other: Uncovered) -> None:
        """Add all that another check left out."""
        for link, reasons in other.skipped.items():
            for why in reasons:
                self.skip(link, why)
        for text in other.listed:
            self.append(text)

    @property
    def not_judged(self) -> tuple[str, ...]:
        """Links that are not judged, as `update: not judged (NAdam has no rule)`."""
        return tuple(f"{link}: not judged ({'; '.join(why)})" for link, why in self.skipped.items())

    @property
    def not_covered(self) -> tuple[str, ...]:
        """All that is not covered; links that are not judged come first."""
        return (*self.not_judged, *self.listed)


class Guard:
    """A guard around the watcher's own code, which catches errors and logs each reason once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, link: str, why: str) -> None:
        """Log a reason as a warning the first time, and at debug level later."""
        text = f"{link}: not judged ({why})"
        log.log(logging.DEBUG if text in self._told else logging.WARNING, "%s; training goes on", text)
        self._told.add(text)

    @contextmanager
    def link(self, uncovered: Uncovered, link: str) -> Iterator[None]:
        """Run a part of a check. An error in it becomes the reason why `link` is not judged."""
        try:
            yield
        except Exception as error:
            why = reason(error)
            log.debug("watch: %s", why, exc_info=True)
            self.tell(link, why)
            uncovered.skip(link, why)


def reason(error: Exception) -> str:
    """Return an error as one line."""
    text = " ".join(str(error).split())
    if isinstance(error, UserError):
        return text
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
