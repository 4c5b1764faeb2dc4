"""Files of one JSON object a line: appended while a run lives, cut back when it resumes from an earlier step."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core.atomic import write_atomically
from core.errors import UserError


class JsonLines:
    """Appends lines and hands each to the operating system at once, so that a crash costs at most the line in work."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from error

    def append(self, value: Mapping[str, Any]) -> None:
        """Write one line. NaN and infinities are written as Python's json does (`NaN`, `Infinity`).

        Raises UserError if the disk refuses, or the file was moved or deleted. Then nothing of the line stays.
        """
        self._write((json.dumps(value, ensure_ascii=False) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # there is nothing left to write: what could not be written was said
            self._file.close()

    def _write(self, line: bytes) -> None:
        descriptor = self._file.fileno()
        try:
            before = os.fstat(descriptor)
            # What goes on into a file that has no name any more is lost, and nobody would know.
            if not os.path.samestat(before, os.stat(self.path)):
                raise UserError(f"cannot write {self.path}: it was replaced while it was written")
            try:
                left = memoryview(line)
                while left:
                    left = left[os.write(descriptor, left) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, before.st_size)
                raise
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror or error}") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines; a missing file has none, and a torn last line is left out.

    Raises UserError if another line is not a JSON object.
    """
    return [value for _, value in _parse(path)]


def cut_after(path: Path, step: int, removed_to: Path) -> int:
    """Keep the lines whose `step` is at most `step`; write the others to `removed_to`. Returns how many were moved.

    Both files are written whole or not at all, the removed lines first. A torn last line is dropped.
    """
    if not path.exists():
        return 0
    keep: list[bytes] = []
    move: list[bytes] = []
    for raw, value in _parse(path):
        (keep if value.get("step", 0) <= step else move).append(raw + b"\n")
    if move:
        write_atomically(removed_to, move)
    write_atomically(path, keep)
    return len(move)


def _parse(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    for number, raw in enumerate(lines, 1):
        if not raw:
            continue
        try:
            value = json.loads(raw)
        except ValueError:
            value = None
        # Whole lines end in a newline: what stands after the last one was being written when the run died.
        if number == len(lines):
            if not isinstance(value, dict):
                return
        elif not isinstance(value, dict):
            raise UserError(f"{path}, line {number}: not a JSON object")
        yield raw, value
