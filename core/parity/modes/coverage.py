"""The count of a run's checks that were made: those that were due and never compared anything are no agreement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Beginning of the reason for a skipped check, if others were still waiting for the reference.
BUSY = "the reference is still busy with"


@dataclass(frozen=True)
class Coverage:
    """A count of a run's checks.

    due: checks that a run asked for. made: those that agreed or disagreed. skipped: step → why, of all others.
    """

    due: int
    made: int
    skipped: Mapping[int, str]

    @property
    def is_enough(self) -> bool:
        """Return whether at least half of the checks that were due were made."""
        return 2 * self.made >= self.due

    @property
    def words(self) -> str:
        """The coverage in a line: checks due, made, skipped, the first reason, and the remedy for a slow reference."""
        first = min(self.skipped)
        busy = sum(reason.startswith(BUSY) for reason in self.skipped.values())
        advice = f"; {busy} because the reference is slower: raise parity.every or parity.queue" if busy else ""
        return (
            f"parity checks: {self.due} due, {self.made} made, fewer than half; {len(self.skipped)} skipped, "
            f"the first at step {first}: {self.skipped[first]}{advice}"
        )


def coverage(due: Sequence[int], lines: Iterable[Mapping[str, Any]], lost: str) -> Coverage:
    """Count the checks of a run. due: their steps. lines: of parity.jsonl. lost: why one has no line."""
    by_step = {line["step"]: line for line in lines}
    skipped: dict[int, str] = {}
    for step in due:
        line = by_step.get(step)
        if line is None:
            skipped[step] = lost
        elif line.get("verdict") not in ("agreed", "disagreed"):
            skipped[step] = line.get("reason") or "nothing could be compared"
    return Coverage(len(due), len(due) - len(skipped), skipped)
