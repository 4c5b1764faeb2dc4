"""Files of one JSON object a line: appended while a run lives, cut back when it resumes from an earlier step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from core.atomic import write_atomically
from core.errors import UserError


class JsonLines:
    """Appends lines and hands each to the operating system at once, so that a crash costs at most the line in work."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the run

    def append(self, value: Mapping[str, Any]) -> None:
        """Write one line. NaN and infinities are written as Python's json does (`NaN`, `Infinity`)."""
        self._file.write(json.dumps(value, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines; a missing file has none, and a torn last line is left out.

    Raises UserError if another line is not a JSON object.
    """
    return [value for _, value in _parse(path)]


def cut_after(path: Path, step: int, removed_to: Path) -> None:
    """Keep the lines whose `step` is at most `step`; the others go to `removed_to`, before those that it holds already.

    Both files are written whole or not at all, the removed lines first: cut short, it is done by doing it again. A torn
    last line is dropped.
    """
    if not path.exists():
        return
    keep: list[bytes] = []
    move: list[bytes] = []
    for raw, value in _parse(path):
        (keep if value.get("step", 0) <= step else move).append(raw + b"\n")
    there = dict.fromkeys(raw + b"\n" for raw, _ in _parse(removed_to))
    if move:
        write_atomically(removed_to, [*(line for line in move if line not in there), *there])
    write_atomically(path, keep)


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
