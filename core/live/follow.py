"""Follow a file of JSON lines while a run writes it, cuts it back or replaces it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import leads_out, require_file
from lockstep.core.files.jsonl import value_of

# Bytes that are read at once: a run that was written for weeks is taken in parts.
MOST = 1 << 26
# Bytes before the place that was come to, which must be what they were: else the file is another one.
_KEPT = 4096


@dataclass(frozen=True)
class News:
    """The part of a file that was not reported before.

    anew: the file is another one than before, or was cut back: what was reported of it does not count. lines: (number,
    object), None for a damaged line. more: whether there is more to read at once.
    """

    anew: bool
    lines: tuple[tuple[int, dict[str, Any] | None], ...]
    more: bool = False


class FollowedLines:
    """A follower of a file: each call returns the lines completed since the last one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place: tuple[int, int] | None = None
        self._read = self._number = 0
        self._last = b""

    def news(self) -> News:
        """Return what is new. A file that is missing holds nothing.

        Raises UserError if it cannot be read, is no file or leads out of its folder.
        """
        if leads_out(self.path, self.path.parent):
            raise UserError(f"{self.path.name} is a link that leads out of the run")
        require_file(self.path)
        try:
            with open(self.path, "rb", buffering=0) as file:
                return self._news(file.fileno())
        except FileNotFoundError:
            anew = self._place is not None
            self._forget(None)
            return News(anew, ())
        except OSError as error:
            raise UserError(f"cannot read {self.path.name}: {error.strerror or error}") from error

    def _news(self, descriptor: int) -> News:
        status = os.fstat(descriptor)
        place = (status.st_dev, status.st_ino)
        # A folder that was made anew may hold a file of the same number.
        same = place == self._place and status.st_size >= self._read
        same = same and os.pread(descriptor, len(self._last), self._read - len(self._last)) == self._last
        anew = self._place is not None and not same
        if not same:
            self._forget(place)
        raw = os.pread(descriptor, MOST, self._read)
        end = raw.rfind(b"\n") + 1
        found = []
        for line in raw[:end].split(b"\n")[:-1]:
            self._number += 1
            if line:
                found.append((self._number, value_of(line)))
        self._read += end
        self._last = (self._last + raw[:end])[-_KEPT:]
        return News(anew, tuple(found), more=len(raw) == MOST and end > 0)

    def _forget(self, place: tuple[int, int] | None) -> None:
        self._place, self._read, self._number, self._last = place, 0, 0, b""
