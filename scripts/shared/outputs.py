"""Files that a command writes about runs, which are none of a run's own."""

from __future__ import annotations

from pathlib import Path

from lockstep.core.config.file import COMMAND_LINE
from lockstep.core.errors import UserError
from lockstep.core.run.layout import CONFIG, INFO, LINES, is_run
from lockstep.scripts.shared.arguments import check_file


def check_output(name: str, path: Path | None) -> None:
    """Raise UserError as `check_file` does, and where `path` is a file by which a run directory is read."""
    check_file(name, path)
    if path is not None and path.name in (CONFIG, INFO, *LINES) and path.exists() and is_run(path.parent):
        raise UserError(f"{COMMAND_LINE}: {name} = {path}: a file of the run {path.parent}; name another")
