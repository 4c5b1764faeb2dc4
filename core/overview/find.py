"""Find the run directories below a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.core.run.layout import CONFIG, INFO, RECORDS

_DIGITS = re.compile(r"(\d+)")
_LONGEST_NUMBER = 18  # digits: longer ones are compared as text


@dataclass
class Found:
    """The runs below a folder. runs: relative paths, in natural order; `.` is the folder itself.

    links: symbolic links to folders, which are not followed. unread: folders that this user may not read.
    """

    runs: list[Path] = field(default_factory=list)
    links: int = 0
    unread: list[Path] = field(default_factory=list)


def find_runs(folder: Path) -> Found:
    """Return the run directories in `folder` and below it.

    A folder is a run's if it holds run.json, or records.jsonl beside config.toml. Folders in a run are not searched,
    nor is a folder whose name begins with a dot: runs that are being made lie there. Symbolic links below
    `folder` are not followed, so that the search ends and stays below it.
    """
    found = Found()
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        try:
            names, folders = _contents(place, found)
        except OSError:
            found.unread.append(place.relative_to(folder))
            continue
        if INFO in names or {CONFIG, RECORDS} <= names:
            found.runs.append(place.relative_to(folder))
        else:
            waiting += folders
    found.runs.sort(key=lambda path: natural(str(path)))
    return found


def natural(text: str) -> list[tuple[int, int, str]]:
    """Return a key by which `trial_9` stands before `trial_10`."""
    return list(_parts(text))


def _parts(text: str) -> Iterator[tuple[int, int, str]]:
    for part in _DIGITS.split(text):
        is_number = part.isascii() and part.isdigit() and len(part) <= _LONGEST_NUMBER
        yield (0, int(part), "") if is_number else (1, 0, part)


def _contents(place: Path, found: Found) -> tuple[set[str], list[Path]]:
    """Return the names of the files in a folder, and the folders to search."""
    names, folders = set(), []
    with os.scandir(place) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if not entry.name.startswith("."):
                    folders.append(place / entry.name)
            elif entry.is_symlink() and entry.is_dir():
                found.links += 1
            else:
                names.add(entry.name)
    return names, folders
