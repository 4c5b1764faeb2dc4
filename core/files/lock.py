"""An advisory lock of a folder for one writer, which the operating system releases when its holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import Self

from lockstep.core.errors import UserError

LOCK_NAME = ".lock"
# Errors of a file system that has no locks, or whose server keeps none.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
# `is_held` holds a lock of its own for some microseconds: a process that collides with it tries again.
_TRIES, _PAUSE = 5, 0.02


class FolderLock:
    """A lock on `folder`/.lock by flock(2), until `release` or the end of a `with`; the file names the holder.

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
            _lock(self._descriptor)
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
        """Release the lock; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_held(folder: Path) -> bool | None:
    """Return whether a process holds the lock of `folder`, and so writes there; None where that is unknown.

    Nothing is written. The lock is asked for as shared with other readers, and given back at once.
    """
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Lock a file for this process alone. Raises OSError: BlockingIOError if another holds it."""
    for tries_left in reversed(range(_TRIES)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not tries_left:
                raise
        time.sleep(_PAUSE)
