"""Texts that can be paths at all, checked before any call of the file system."""

from __future__ import annotations

import shlex
from pathlib import Path

# Limits of Linux and macOS, in bytes: a name between slashes, and a path with its end.
LONGEST_NAME, LONGEST_PATH = 255, 4096


def quoted(path: Path) -> str:
    """Return a path as a word of a line to copy into a shell."""
    return shlex.quote(str(path))


def path_problem(text: str) -> str | None:
    """Explain why no file can have this path, or None: Python raises errors of its own for such a path."""
    if "\0" in text:
        return "a path holds no null characters"
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        return "a path that is not UTF-8 cannot be written down in a run"
    if len(raw) >= LONGEST_PATH or any(len(name) > LONGEST_NAME for name in raw.split(b"/")):
        return f"too long: a path has up to {LONGEST_PATH - 1} bytes, and a name in it up to {LONGEST_NAME}"
    return None
