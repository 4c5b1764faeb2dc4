"""Keep the results of clean runs, by comparison, in files, so that bounds can be derived again without the runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.core.files.atomic import write_atomically
from lockstep.core.parity.measures.distances import Distances
from lockstep.core.parity.measures.peaks import Peaks

Sample = tuple[str, Distances, int]  # kind, distances, numbers
Checks = list[list[Sample]]  # one list per check, in the order of a draw's checks


def kept(path: Path | None, make: Callable[[], Checks]) -> Checks:
    """Return the samples in a file; without the file, make and write them. A path of None keeps nothing."""
    if path is not None and path.exists():
        return [[_sample(row) for row in check] for check in json.loads(path.read_text())]
    made = make()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(
            path, [json.dumps([[(kind, asdict(d), size) for kind, d, size in check] for check in made]).encode()]
        )
    return made


def _sample(row: list[Any]) -> Sample:
    kind, d, size = row
    peaks = d.pop("peaks")
    return kind, Distances(**d, peaks=Peaks(**peaks) if peaks else None), size
