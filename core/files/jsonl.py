"""Files of one JSON object a line, each with a checksum: appended while a run lives, cut back when it resumes.

The last key of every line is `crc32`: zlib.crc32 of all bytes of the line before `"crc32"`, as eight lower-case
hexadecimal digits. So a whole line ends in the twenty bytes `"crc32": "0f3a12bc"}` and a newline.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import require_file, write_atomically

CHECKSUM = "crc32"
_END = f'"{CHECKSUM}": "%08x"}}'
_END_BYTES = len(_END % 0)
# Lines of parity checks are long: pieces of the usual 8 KiB would be joined for each of them.
_BUFFER_BYTES = 1 << 20
# A line's end followed by more: two lines that lost the newline between them, or a last line that lost its own.
_BEYOND_THE_END = re.compile(rb'"crc32": "[0-9a-f]{8}"\}.', re.DOTALL)


class DamagedLine(UserError):
    """A line that is not what was written: names the file and the line."""


@dataclass(frozen=True)
class Line:
    """A line as it stands in a file. number: from 1. raw: without its newline.

    value: the object without its checksum, None if the line is damaged or torn.
    torn: whether it is the last one, of which a crash left only a beginning.
    """

    number: int
    raw: bytes
    value: dict[str, Any] | None
    torn: bool = False

    @property
    def damaged(self) -> bool:
        """Return whether it was changed after it was written."""
        return self.value is None and not self.torn


class JsonLines:
    """A file of lines, each handed to the operating system at once: a crash costs at most the line in work.

    The torn line of an earlier crash is cut off first: the next one would be spoilt by it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            _mend_the_end(path)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from error

    def append(self, value: Mapping[str, Any]) -> None:
        """Write one line. NaN and infinities are written as Python's json does (`NaN`, `Infinity`).

        Raises UserError if the disk refuses, or the file was moved or deleted. Then nothing of the line stays.
        """
        self._write(sealed_line(value))

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # nothing is left to write: failed writes were already reported
            self._file.close()

    def _write(self, line: bytes) -> None:
        descriptor = self._file.fileno()
        try:
            before = os.fstat(descriptor)
            # Lines written to a file without a name are lost, and no error is raised.
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


def sealed_line(value: Mapping[str, Any]) -> bytes:
    """Return `value` as a line, with its checksum and newline; UTF-8."""
    assert CHECKSUM not in value, "the checksum's own key"
    try:
        text = json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 has no bytes for
        text = json.dumps(value).encode()
    covered = text[:-1] + (b", " if value else b"")
    return covered + (_END % zlib.crc32(covered)).encode() + b"\n"


def scan_lines(path: Path) -> Iterator[Line]:
    """Yield every line, the damaged ones too. A missing file has none. Raises UserError if the file cannot be read."""
    require_file(path)
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                raw = line.removesuffix(b"\n")
                if raw:
                    value = _value(raw)
                    # Whole lines end in a newline: the text after the last newline was being written at the crash.
                    torn = value is None and raw == line and not _BEYOND_THE_END.search(raw)
                    yield Line(number, raw, value, torn)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def raw_lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Return each line that is whole, without its newline, and whether it is what was written; no object is made of it.

    A missing file has none. Raises UserError if the file cannot be read.
    """
    require_file(path)
    try:
        with open(path, "rb", buffering=_BUFFER_BYTES) as file:
            for line in file:
                raw = line.removesuffix(b"\n")
                intact = _intact(raw)
                if raw and (intact or raw != line or _BEYOND_THE_END.search(raw)):
                    yield raw, intact
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def value_of(raw: bytes) -> dict[str, Any] | None:
    """Return the object of one line, given without its newline, without its checksum; None if the line is damaged."""
    return _value(raw)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return all lines without their checksums; a missing file has none, and a torn last line is left out.

    Raises DamagedLine if another line is not what was written.
    """
    values = []
    for line in scan_lines(path):
        if line.damaged:
            raise DamagedLine(damage(path, [line.number]))
        if line.value is not None:
            values.append(line.value)
    return values


def damage(path: Path, numbers: list[int]) -> str:
    """Return `records.jsonl, line 7: damaged after it was written (…)`."""
    one = len(numbers) == 1
    return (
        f"{path}, line{'' if one else 's'} {in_ranges(numbers)}: damaged after {'it was' if one else 'they were'} "
        f"written ({'its' if one else 'their'} {CHECKSUM} does not match)"
    )


def in_ranges(numbers: Iterable[int]) -> str:
    """Return rising numbers in words: `1, 4 to 6, 9`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in ranges)


@dataclass(frozen=True)
class Cut:
    """The result of `cut_after`. steps: of lines that stay. moved: lines of later steps. damaged: numbers of lines."""

    steps: frozenset[int]
    moved: int
    damaged: tuple[int, ...]


def cut_after(path: Path, step: int, removed_to: Path, damaged_to: Path) -> Cut:
    """Keep the lines whose `step` is at most `step`; the others go to `removed_to`, damaged ones to `damaged_to`.

    There they stand before the lines that those files hold already. Each file is written whole or not at all, this one
    last: cut short, it is done by doing it again. A torn last line is dropped.
    """
    keep: list[bytes] = []
    move: list[bytes] = []
    bad: list[Line] = []
    steps: set[int] = set()
    for line in scan_lines(path):
        if line.damaged:
            bad.append(line)
        elif line.value is not None:
            stays = line.value.get("step", 0) <= step
            (keep if stays else move).append(line.raw + b"\n")
            steps |= {line.value.get("step", 0)} if stays else set()
    for aside, lines in ((removed_to, move), (damaged_to, [line.raw + b"\n" for line in bad])):
        if lines:
            aside.parent.mkdir(parents=True, exist_ok=True)
            there = dict.fromkeys(line.raw + b"\n" for line in scan_lines(aside))
            write_atomically(aside, [*(line for line in lines if line not in there), *there])
    if path.exists():
        write_atomically(path, keep)
    return Cut(frozenset(steps), len(move), tuple(line.number for line in bad))


def _value(raw: bytes) -> dict[str, Any] | None:
    """Return the object that a line holds, without its checksum; None if it is damaged."""
    if not _intact(raw):
        return None
    try:
        value = json.loads(raw)
        del value[CHECKSUM]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _intact(raw: bytes) -> bool:
    return raw[-_END_BYTES:] == (_END % zlib.crc32(memoryview(raw)[:-_END_BYTES])).encode()


def _mend_the_end(path: Path) -> None:
    """Cut off a torn last line; one that lacks nothing but its newline gets it."""
    try:
        with open(path, "rb+") as file:
            size = file.seek(0, 2)
            if not size or file.seek(size - 1) < 0 or file.read(1) == b"\n":
                return
            (last,) = deque(scan_lines(path), maxlen=1)
            if last.torn:
                file.truncate(size - len(last.raw))
            else:
                file.seek(size)
                file.write(b"\n")
    except FileNotFoundError:
        return
