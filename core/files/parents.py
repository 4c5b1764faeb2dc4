"""Folders above a new one: made together, and taken back together."""

from __future__ import annotations

import contextlib
from pathlib import Path


def make_parents(folder: Path) -> list[Path]:
    """Make `folder` and what is missing above it; returns what was made, outermost first. All or nothing."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    made: list[Path] = []
    try:
        for parent in reversed(missing):
            parent.mkdir()
            made.append(parent)
    except OSError:
        for parent in reversed(made):
            parent.rmdir()
        raise
    return made


def remove_parents(made: list[Path]) -> None:
    """Remove the folders that `make_parents` returned, as far as they are empty."""
    for parent in reversed(made):
        with contextlib.suppress(OSError):  # not empty: another process uses it by now
            parent.rmdir()
