"""A checkpoint to which every rank of a session writes its part: rank 0 makes the folder and announces it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from lockstep.core.backend import Session, Writing
from lockstep.core.checkpoint.format import Pending, writer_of
from lockstep.core.run.ranks import Ranks

ASKED = "`begin a checkpoint`"
Write = Callable[[Path], Writing]


def begin_on_all(session: Session, ranks: Ranks, begin: Callable[[Write], Pending]) -> Pending:
    """Begin a checkpoint on rank 0, while the others call `part_of`; return it, of which `commit` is for all ranks.

    begin: makes the folder and calls its argument with it. Raises the exceptions of `begin`; then the others have no
    part.
    """
    folders: list[Path] = []

    def write(folder: Path) -> Writing:
        folders.append(folder)
        ranks.of_first(lambda: str(folder.resolve()), ASKED)
        return writer_of(session)(folder)

    try:
        return begin(write)
    finally:
        if not folders:
            ranks.of_first(str, ASKED)


def part_of(session: Session, ranks: Ranks) -> Writing | None:
    """Begin this rank's part of the checkpoint that rank 0 begins, for `write_part`; None if there is none."""
    folder = ranks.of_first(str, ASKED)
    return writer_of(session)(Path(folder)) if folder else None


def write_part(writing: Writing) -> None:
    """Write a rank's part. An error is raised on every rank, and rank 0 reports it."""
    with contextlib.suppress(OSError):
        if not writing.not_finite():
            writing.wait()
