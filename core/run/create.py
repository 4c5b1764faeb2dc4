"""The making of a run directory: put together beside its place, then renamed, so that a failed start leaves nothing."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.core.config.file import dump_config
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.files.lock import FolderLock
from lockstep.core.files.parents import make_parents, remove_parents
from lockstep.core.files.paths import quoted
from lockstep.core.run.info import write_info
from lockstep.core.run.layout import CHECKPOINTS, CONFIG, INFO, is_run


def check_free(path: Path, overwrite: bool) -> bool:
    """Return whether an earlier run lies at `path`. Raises UserError if a new one cannot take its place."""
    occupied = path.is_dir() and any(path.iterdir())
    if (path.exists() or path.is_symlink()) and not path.is_dir():
        raise UserError(f"{path} is a file, not a folder for a run")
    if occupied and not is_run(path):
        raise UserError(f"{path} is not empty and not a run: choose another name")
    if occupied and not overwrite:
        raise UserError(f"{path} holds a run already: --overwrite replaces it, --resume {quoted(path)} goes on with it")
    return occupied


def create_folder(
    path: Path, config: RunConfig, info: Mapping[str, Any], overwrite: bool
) -> tuple[FolderLock, list[Path]]:
    """Make a folder with config.toml, run.json (`info`) and an empty folder for checkpoints.

    `overwrite` replaces an earlier run, and never a folder that is not a run. Folders that a killed process left beside
    `path` are removed.

    Returns:
        The lock of the folder, held; the parents that were made for it, outermost first.

    Raises:
        UserError: `path` is in use, or cannot be written. Nothing is left then, not even new parents.
    """
    _clear_beside(path)
    occupied = check_free(path, overwrite)
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    replaced = path.with_name(f".{path.name}.{os.getpid()}.old")
    old_lock = lock = None
    new_parents: list[Path] = []
    done = False
    try:
        old_lock = FolderLock(path) if occupied else None
        new_parents = make_parents(path.parent)
        beside.mkdir()
        lock = FolderLock(beside)
        (beside / CONFIG).write_text(dump_config(config), encoding="utf-8")
        write_info(beside / INFO, info)
        (beside / CHECKPOINTS).mkdir()
        if occupied:
            os.rename(path, replaced)
        os.rename(beside, path)
        done = True
    except OSError as error:
        raise UserError(f"cannot make {path}: {error.strerror or error}") from error
    finally:
        if old_lock:
            old_lock.release()
        if not done:
            if lock:
                lock.release()
            if replaced.exists() and not path.exists():
                os.rename(replaced, path)
            shutil.rmtree(beside, ignore_errors=True)
            remove_parents(new_parents)
        shutil.rmtree(replaced, ignore_errors=True)
    return lock, new_parents


def _clear_beside(path: Path) -> None:
    """Delete the folders that a killed `create_folder` left beside `path`; put back a run that it had moved away."""
    left_over = re.compile(rf"\.{re.escape(path.name)}\.\d+\.(new|old)")
    try:
        found = [entry for entry in path.parent.iterdir() if left_over.fullmatch(entry.name)]
    except OSError:
        return  # nothing can be made there, and `create_folder` will raise
    for folder in found:
        try:
            lock = FolderLock(folder)
        except UserError:
            continue  # its process is at work
        if folder.suffix == ".old" and is_run(folder) and not path.exists():
            os.rename(folder, path)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        lock.release()
