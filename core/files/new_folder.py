"""A new folder, put together beside its place and renamed: whole, or not there."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import flush_folder
from lockstep.core.files.lock import FolderLock
from lockstep.core.files.parents import make_parents, remove_parents


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` at which the block makes a folder, which is then renamed to `path`.

    After an error nothing is left, not even new parents. Folders that killed processes left beside `path` are removed.
    Raises UserError if `path` is there, or if the disk refuses.
    """
    if path.exists() or path.is_symlink():
        raise UserError(f"{path} exists already; name a new folder")
    _clear_beside(path)
    holds = path.with_name(f".{path.name}.{os.getpid()}.new")
    parents: list[Path] = []
    lock, done = None, False
    try:
        parents = make_parents(path.parent)
        holds.mkdir()
        lock = FolderLock(holds)
        yield holds / "made"
        flush_folder(holds / "made")
        os.rename(holds / "made", path)
        flush_folder(path.parent)
        done = True
    except OSError as error:
        raise UserError(f"cannot make {path}: {error.strerror or error}") from error
    finally:
        if lock:
            lock.release()
        shutil.rmtree(holds, ignore_errors=True)
        if not done:
            remove_parents(parents)


def _clear_beside(path: Path) -> None:
    left_over = re.compile(rf"\.{re.escape(path.name)}\.\d+\.new")
    try:
        found = [entry for entry in path.parent.iterdir() if left_over.fullmatch(entry.name) and not entry.is_symlink()]
    except OSError:
        return  # nothing can be made there, and making it raises the error
    for folder in found:
        try:
            lock = FolderLock(folder)
        except UserError:
            continue  # its process is at work
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()
