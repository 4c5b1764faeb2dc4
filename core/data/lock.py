"""One preparation per folder at a time."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from core.errors import UserError

LOCK_NAME = ".lock"


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process. The kernel lets go when the process ends, however it ends.

    The file itself stays: removing it would let two processes hold locks on two files of one name.

    Raises:
        UserError: another process holds it, or the folder cannot be written.
    """
    try:
        file = open(folder / LOCK_NAME, "wb")  # noqa: SIM115 - closed below, after the lock is taken
    except OSError as error:
        raise UserError(f"cannot write in {folder}: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process is preparing {folder}; wait for it or choose another folder") from error
        except OSError as error:
            raise UserError(f"cannot lock {folder / LOCK_NAME}: {error.strerror or error}") from error
        yield
