"""Count the checks that a run made. A due check that compared nothing does not count as agreement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Beginning of the reason for a skipped check, if earlier checks were still waiting for the reference.
BUSY = "the reference is still busy with"


@dataclass(frozen=True)
class Coverage:
    """Counts of a run's checks.

    due: number of checks that were due.
    made: number of checks that agreed or disagreed.
    skipped: step → reason, for all others.
    """

    due: int
    made: int
    skipped: Mapping[int, str]

    @property
    def is_enough(self) -> bool:
        """Return whether at least half of the due checks were made."""
        return 2 * self.made >= self.due

    @property
    def words(self) -> str:
        """The coverage in a line: checks due, made and skipped, the first reason, and a remedy for a slow reference."""
        first = min(self.skipped)
        busy = sum(reason.startswith(BUSY) for reason in self.skipped.values())
        advice = f"; {busy} because the reference is slower: raise parity.every or parity.queue" if busy else ""
        return (
            f"parity checks: {self.due} due, {self.made} made, fewer than half; {len(self.skipped)} skipped, "
            f"the first at step {first}: {self.skipped[first]}{advice}"
        )


def coverage(due: Sequence[int], lines: Iterable[Mapping[str, Any]], lost: str) -> Coverage:
    """Count the checks of a run.

    due: steps whose check was due.
    lines: lines of parity.jsonl.
    lost: reason for a check without a line.
    """
    by_step = {line["step"]: line for line in lines}
    skipped: dict[int, str] = {}
    for step in due:
        line = by_step.get(step)
        if line is None:
            skipped[step] = lost
        elif line.get("verdict") not in ("agreed", "disagreed"):
            skipped[step] = line.get("reason") or "nothing could be compared"
    return Coverage(len(due), len(due) - len(skipped), skipped)
