"""One writer a folder: an advisory lock that the operating system takes back when its holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Self

from lockstep.core.errors import UserError

LOCK_NAME = ".lock"
# What a file system says that has no locks, or whose server keeps none.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class FolderLock:
    """Holds `folder`/.lock with flock(2) until `release` or the end of a `with`; the file names who holds it.

    The file itself stays: removing it would let two processes hold locks on two files of one name.
    Raises UserError if another process (or another lock of this one) holds it, the folder is not writable, or its file
    system has no locks.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_NAME
        try:
            # Opening a link for writing would empty its target.
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            if error.errno in NO_LOCKS:
                raise UserError(
                    f"cannot lock {self.path}: {error.strerror}: this file system has no locks, so nothing keeps a "
                    "second process from writing there; choose a folder on another one, such as a local disk"
                ) from error
            if not isinstance(error, BlockingIOError):
                raise UserError(f"cannot lock {self.path}: {error.strerror or error}") from error
            raise UserError(f"{folder} is being written by another process (pid {holder or 'unknown'})") from None
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(self._descriptor)
            raise UserError(f"cannot write {self.path}: {error.strerror or error}") from error

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
