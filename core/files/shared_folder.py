"""Test whether processes on other machines see a folder, and whether they run the same sources."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import TEMPORARY_SUFFIX

# A network file system may show a new file late.
LATE_SECONDS = 5.0


@contextmanager
def token(folder: Path) -> Iterator[str]:
    """Create a file of a name that was never used in `folder`, for the block. Raises UserError if the disk refuses."""
    name = f".{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
    try:
        (folder / name).touch()
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error
    try:
        yield name
    finally:
        (folder / name).unlink(missing_ok=True)


def sees(file: Path) -> bool:
    """Return whether `file` is there, after a wait of at most LATE_SECONDS."""
    until = time.monotonic() + LATE_SECONDS
    while not (found := file.exists()) and time.monotonic() < until:
        with suppress(OSError):
            # NFS fetches a folder anew from its server when it is opened, and not when a name in it is looked up.
            os.listdir(file.parent)
        time.sleep(0.1)
    return found


def sources_fingerprint(root: Path, packages: Iterable[str], versions: str) -> str:
    """Return the SHA-256, in hexadecimal, of `versions` and of all Python files of `packages` below `root`."""
    found = hashlib.sha256(versions.encode())
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            found.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return found.hexdigest()
