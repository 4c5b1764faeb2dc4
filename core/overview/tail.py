"""Read the last records of a run without reading the others: a run has as many as it likes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import leads_out, require_file
from lockstep.core.files.jsonl import value_of

# Bytes that are read from the end; as many of them, if no validation loss stands in the first.
CHUNK, MOST = 1 << 18, 1 << 22
# Records whose losses and throughputs make one figure: single steps are noisy.
RECENT = 20
_VALIDATION = "val/loss"
_LARGEST_STEP = 2**63


@dataclass(frozen=True)
class Tail:
    """The end of records.jsonl.

    step: the last one, None without a record. loss: mean over the last `RECENT` records that were not left out, NaN if
    one of them is. validation: (step, loss) of the last one. speed: median tokens a second of the same records.
    written: time of the last change, in seconds since 1970; None without a file. damaged: lines there that are not what
    was written.
    """

    step: int | None = None
    loss: float | None = None
    validation: tuple[int, float] | None = None
    speed: float | None = None
    written: float | None = None
    damaged: int = 0


def read_tail(path: Path) -> Tail:
    """Return the end of the records in `path`; an empty one if there is no such file.

    Raises UserError if the file leads out of its folder, is none, cannot be read, or holds what no run writes.
    """
    if leads_out(path, path.parent):
        raise UserError(f"{path.name} is a link that leads out of the run")
    require_file(path)
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            found, damaged, size = _records(file.fileno(), status.st_size, CHUNK)
            if _validation(found) is None and size < status.st_size:
                found, damaged, _ = _records(file.fileno(), status.st_size, MOST)
    except FileNotFoundError:
        return Tail()
    except OSError as error:
        raise UserError(f"cannot read {path.name}: {error.strerror or error}") from error
    if not found:
        return Tail(written=status.st_mtime, damaged=damaged)
    recent = [record for record in found if record.get("left_out") is None][-RECENT:]
    losses = [float(record["loss"]) for record in recent]
    return Tail(
        step=found[-1]["step"],
        loss=math.fsum(losses) / len(losses) if losses and all(map(math.isfinite, losses)) else _worst(losses),
        validation=_validation(found),
        speed=_median([v for record in recent if is_number(v := record.get("tokens_per_second")) and math.isfinite(v)]),
        written=status.st_mtime,
        damaged=damaged,
    )


def is_number(value: Any) -> bool:
    """Return whether a value of a JSON file is a number that a float can hold."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < _LARGEST_STEP
    return isinstance(value, float)


def _records(descriptor: int, size: int, most: int) -> tuple[list[dict[str, Any]], int, int]:
    """The records in the last `most` bytes, how many lines there are damaged, and the bytes that were read."""
    start = max(0, size - most)
    raw = os.pread(descriptor, most, start)
    lines = raw.split(b"\n")
    if start:  # it began in the midst of a line
        lines = lines[1:]
    whole, last = lines[:-1], lines[-1:]
    values = [value_of(line) for line in whole if line] + [v for line in last if (v := value_of(line)) is not None]
    found: dict[int, dict[str, Any]] = {}
    for value in values:
        if value is None:
            continue
        step = value.get("step")
        if not (isinstance(step, int) and is_number(step) and is_number(value.get("loss"))):
            raise UserError("records.jsonl: a record has a whole number `step` and a number `loss`")
        found[step] = value
    return [found[step] for step in sorted(found)], values.count(None), len(raw)


def _validation(records: list[dict[str, Any]]) -> tuple[int, float] | None:
    for record in reversed(records):
        metrics = record.get("metrics")
        if isinstance(metrics, Mapping) and is_number(value := metrics.get(_VALIDATION)):
            return record["step"], float(value)
    return None


def _worst(losses: list[float]) -> float | None:
    """A mean with a loss in it that is not finite: NaN before an infinity."""
    return math.nan if any(map(math.isnan, losses)) else math.inf if losses else None


def _median(values: list[float]) -> float | None:
    """The middle value, the lower one of two."""
    return sorted(values)[(len(values) - 1) // 2] if values else None
