"""Compare the ranks' hosts, code and view of the file system."""

from __future__ import annotations

import hashlib
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.core.errors import UserError

# A network file system may show a new file late.
LATE_SECONDS = 5.0
PACKAGES = ("core", "torch_backend")


@dataclass(frozen=True)
class Place:
    """sees: whether a file that rank 0 has just made is there. code: SHA-256 of torch's version and our sources."""

    host: str
    sees: bool
    torch: str
    code: str


@contextmanager
def token(folder: Path) -> Iterator[str]:
    """A file of a name that was never used, for a while. Raises UserError if the disk refuses."""
    name = f".{secrets.token_hex(8)}.tmp"
    try:
        (folder / name).touch()
        yield name
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error
    finally:
        (folder / name).unlink(missing_ok=True)


def place_of_rank(file: Path) -> Place:
    """Return the place of this rank; wait up to LATE_SECONDS for the file."""
    until = time.monotonic() + LATE_SECONDS
    while not (sees := file.exists()) and time.monotonic() < until:
        time.sleep(0.1)
    version = f"torch {torch.__version__}"
    return Place(socket.gethostname(), sees, version, _fingerprint(version))


def _fingerprint(version: str) -> str:
    found = hashlib.sha256(version.encode())
    root = Path(__file__).resolve().parents[2]
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            found.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return found.hexdigest()
