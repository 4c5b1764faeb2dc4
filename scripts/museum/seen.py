"""Results of one run of an exhibit's loop: the loss, and Lockstep's findings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Seen:
    """The result of every loop.

    found: a watcher; a report of `assert_honest`, or its NotHonest.
    losses: from the loop's own log, one per step. held_out: the loss on text that was not trained on.
    shown: other numbers that show the bug, by name.
    """

    found: Any
    losses: Sequence[float] = ()
    held_out: float | None = None
    shown: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return verdict, first bad step, stages and words, with the losses; JSON-ready."""
        numbers = {
            "losses": [_number(x) for x in self.losses],
            "held_out": _number(self.held_out),
            "shown": {key: _number(x) for key, x in self.shown.items()},
        }
        return (_watched(self.found) if hasattr(self.found, "checks") else _honest(self.found)) | numbers


def _watched(watcher: Any) -> dict[str, Any]:
    from lockstep.core.parity.watch.words import in_words

    bad = next((check for check in watcher.checks if check.verdict == "disagreed"), None)
    check = bad or (watcher.checks[-1] if watcher.checks else None)
    return {
        "verdict": watcher.verdict,
        "step": bad.step if bad else None,
        "checks": len(watcher.checks),
        "stages": sorted({f.stage for f in bad.findings if not f.ok}) if bad else [],
        "words": in_words(check) if check else watcher.headline,
        "headline": watcher.headline,
    }


def _honest(found: Any) -> dict[str, Any]:
    report = getattr(found, "report", found)
    words = str(report)
    return {
        "verdict": "agreed" if report.ok else "disagreed",
        "step": None if report.ok else 0,
        "checks": 1,
        "stages": [one.name for one in report.results if not one.ok],
        "words": words,
        "headline": words.splitlines()[0],
    }


def _number(x: float | None) -> float | str | None:
    """Return a number for JSON, with infinities and NaN as strings."""
    return x if x is None or math.isfinite(x) else str(x)
