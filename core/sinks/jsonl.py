"""Records and checks as lines of the run directory."""

from __future__ import annotations

from dataclasses import asdict

from lockstep.core.backend import StepRecord
from lockstep.core.parity.measures.verdict import SCHEMA, Check
from lockstep.core.run.checkpoints import Saved
from lockstep.core.run.directory import RunDir


class JsonlSink:
    """A sink that appends to records.jsonl and parity.jsonl. The run directory is not closed with the sink."""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    def record(self, record: StepRecord) -> None:
        """Write a line of records.jsonl."""
        self._run.append_record(record)

    def check(self, check: Check) -> None:
        """Write a line of parity.jsonl."""
        self._run.append_check(check.to_json())

    def skipped(self, step: int, reason: str) -> None:
        """Write a line of parity.jsonl with the reason why there is no verdict."""
        self._run.append_check({"schema": SCHEMA, "step": step, "verdict": "skipped", "reason": reason})

    def saved(self, saved: Saved) -> None:
        """Write a line of checkpoints.jsonl."""
        self._run.append_saved(asdict(saved))

    def note(self, text: str) -> None:
        """Do nothing: notes are for the terminal."""

    def close(self) -> None:
        """Do nothing: the lines are already written."""
