"""Files that are either whole or absent: atomic writes and JSON that notices when it was changed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lockstep.core.errors import UserError

TEMPORARY_SUFFIX = ".lockstep-tmp"
_SEAL = "seal"


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write `chunks` to `path` so that a reader sees the old file or the new one, never a part.

    A temporary file in the same folder is written, flushed to the disk and renamed over `path`; then the
    folder itself is flushed, so that the name survives a power cut as well.

    Raises:
        UserError: the folder cannot be written, the disk is full, or `path` is a folder, a device or a pipe. Nothing is
            left behind.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        # A rename would replace a device or a pipe by a file, and not write to it.
        raise UserError(f"cannot write {path}: it is there, and no file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        # A new file: through a link of that name, another file would be overwritten.
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        flush_folder(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        # After a success the name is already gone; after any failure the partial file must be removed.
        with contextlib.suppress(OSError):
            temporary.unlink()


def is_inside(name: str) -> bool:
    """Return whether a name from a file is that of something below a folder, and leads nowhere else."""
    return bool(name) and not name.startswith("/") and not {"", ".", ".."} & set(name.split("/"))


def leads_out(path: Path, folder: Path) -> bool:
    """Return whether `path` is a symbolic link that leads out of `folder`."""
    return path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def links_out(folder: Path, but: str = "") -> Iterator[Path]:
    """Return the symbolic links below `folder` that lead out of it. but: a folder of `folder` that is not entered."""
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            if leads_out(path, folder):
                yield path
        if but in folders and Path(place) == folder:
            folders.remove(but)


def require_file(path: Path) -> None:
    """Raise UserError if `path` is a pipe, a device or a socket: who opens one may wait or read for ever."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # opening it raises the error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(f"cannot read {path}: it is no file")


def read_whole(path: Path) -> bytes:
    """Read the bytes of a file. Raises UserError if it is missing, no file or cannot be read."""
    require_file(path)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def remove_temporaries(folder: Path) -> None:
    """Remove what a killed process may have left in `folder`. The caller holds the folder's lock."""
    for left_over in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        left_over.unlink(missing_ok=True)


def canonical_json(value: Any) -> bytes:
    """Return the one byte string for a JSON value: keys sorted, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def write_sealed_json(path: Path, value: dict[str, Any], *, indent: int | None) -> None:
    """Write `value` atomically as JSON with one more key, `seal`: the SHA-256 of the rest."""
    write_atomically(path, [sealed_json(value, indent)])


def read_sealed_json(
    path: Path, *, indent: int | None, remedy: str = "prepare the data again with --force"
) -> dict[str, Any]:
    """Read what `write_sealed_json` wrote with the same `indent`.

    The bytes must be exactly those that would be written again, so any changed byte is noticed, even one
    that JSON does not care about. remedy: what to do about it, for the error.

    Raises:
        UserError: the file cannot be read, is not JSON, or was changed after it was written.
    """
    require_file(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        value = json.loads(raw)
        value.pop(_SEAL)
        intact = sealed_json(value, indent) == raw
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise UserError(f"{path} is damaged or was edited (its checksum does not match); {remedy}")
    return dict(value)


def sealed_json(value: dict[str, Any], indent: int | None) -> bytes:
    """Return the bytes that `write_sealed_json` writes."""
    seal = hashlib.sha256(canonical_json(value)).hexdigest()
    text = json.dumps({**value, _SEAL: seal}, sort_keys=True, indent=indent, allow_nan=False)
    return text.encode("ascii") + b"\n"


def flush_folder(folder: Path) -> None:
    """Flush a folder to the disk, so that the names in it survive a power cut; a file as well."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
