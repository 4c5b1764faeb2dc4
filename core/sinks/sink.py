"""Define the interface of a destination of records."""

from __future__ import annotations

from typing import Protocol

from lockstep.core.backend import StepRecord
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.run.checkpoints import Saved


class Sink(Protocol):
    """A receiver of the loop's events, in their order. Checks may come some steps late."""

    def record(self, record: StepRecord) -> None:
        """Take a record: one optimizer step is done."""
        ...

    def check(self, check: Check) -> None:
        """Take a check: one checked step has its findings."""
        ...

    def skipped(self, step: int, reason: str) -> None:
        """Report that a check that was due at `step` did not take place."""
        ...

    def saved(self, saved: Saved) -> None:
        """Report that a checkpoint is on the disk."""
        ...

    def note(self, text: str) -> None:
        """Take a note for the reader."""
        ...

    def close(self) -> None:
        """Close it after the last event; a second call does nothing."""
        ...
