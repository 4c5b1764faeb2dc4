"""A branch of a run as a run: what a resume from an earlier step, or an alarm that rolled back, took away."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lockstep.core.checkpoint.format import checkpoint_step, list_checkpoints
from lockstep.core.config.file import load_config
from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import read_lines
from lockstep.core.run.directory import RunDir
from lockstep.core.run.history import before_left, settings_at
from lockstep.core.run.layout import CHECKS, CONFIG, INFO, OBSERVATIONS, RECORDS, observation_files

# The folder to which `RunDir.resume_from` moves what it removes.
_FOLDER = re.compile(r"branches/\d{3,}")


class RunBranch(RunDir):
    """A read-only view of the run before its resume number `number` cut it.

    RunBranch i holds what came after its `from_step`. Before that stands what the run had then: later resumes may have
    taken some of it into branches of their own, and the run itself holds the rest.
    """

    def __init__(self, run: RunDir, number: int) -> None:
        branches = run.info.get("branches", [])
        if not 1 <= number <= len(branches):
            known = f"it has 1 to {len(branches)}" if branches else "it has none"
            raise UserError(f"{run.path} has no branch {number}: {known}")
        for branch in branches:
            if not _FOLDER.fullmatch(str(branch["path"])):
                raise UserError(f"{run.path / INFO} names {branch['path']!r}, which is no folder of a branch")
        info = before_left(run.info, branches[number - 1]["path"])
        super().__init__(run.path, load_config(run.path / CONFIG, settings_at(info)), info, None)
        # (folder, the last step that is taken from it), newest first; the run itself stands last.
        self._parts: list[tuple[Path, float]] = [(run.path / branches[number - 1]["path"], float("inf"))]
        reach = branches[number - 1]["from_step"]
        for later in branches[number:]:
            self._parts.append((run.path / later["path"], reach))
            reach = min(reach, later["from_step"])
        self._run, self._reach = run, reach

    def records(self) -> list[dict[str, Any]]:
        """Return the records of this branch and of all before it, by step."""
        return self._lines(RECORDS, self._run.records())

    def checks(self) -> list[dict[str, Any]]:
        """Return the checks of this branch and of all before it, by step."""
        return self._lines(CHECKS, self._run.checks())

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints of this branch and of all before it, oldest first."""
        found = [p for p in self._run.checkpoints() if _step(p) <= self._reach]
        for folder, last in self._parts:
            found += [p for p in list_checkpoints(folder) if _step(p) <= last]
        return sorted(found, key=_step)

    def observations(self) -> dict[int, Path]:
        """Map each step to the file of what was observed in this branch and in all before it."""
        found = {step: path for step, path in self._run.observations().items() if step <= self._reach}
        for folder, last in self._parts:
            found |= {step: path for step, path in observation_files(folder / OBSERVATIONS).items() if step <= last}
        return found

    def _lines(self, name: str, of_run: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found = [line for line in of_run if line["step"] <= self._reach]
        for folder, last in self._parts:
            found += [line for line in read_lines(folder / name) if line["step"] <= last]
        return sorted(found, key=lambda line: int(line["step"]))


def _step(path: Path) -> int:
    return checkpoint_step(path) or 0
