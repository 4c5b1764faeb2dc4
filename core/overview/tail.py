"""Read the last records of a run without reading the others: a run has any number of them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import leads_out, require_file
from lockstep.core.files.jsonl import value_of

# Bytes that are read from the end; more of them, if what is looked for does not stand there.
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
            found = _end_of(file.fileno(), status.st_size, CHUNK)
            if not found.is_whole and status.st_size > CHUNK:
                found = _end_of(file.fileno(), status.st_size, MOST)
    except FileNotFoundError:
        return Tail()
    except OSError as error:
        raise UserError(f"cannot read {path.name}: {error.strerror or error}") from error
    losses = [float(record["loss"]) for record in found.recent]
    speeds = [value for record in found.recent if is_number(value := record.get("tokens_per_second"))]
    return Tail(
        step=found.step,
        loss=math.fsum(losses) / len(losses) if losses and all(map(math.isfinite, losses)) else _worst(losses),
        validation=found.validation,
        speed=_median([speed for speed in speeds if math.isfinite(speed)]),
        written=status.st_mtime,
        damaged=found.damaged,
    )


@dataclass
class _End:
    """The values read from the end backwards. recent: records that were not left out, the last one first."""

    step: int | None = None
    recent: list[dict[str, Any]] = field(default_factory=list)
    validation: tuple[int, float] | None = None
    damaged: int = 0

    @property
    def is_whole(self) -> bool:
        """Return whether there is nothing more to look for."""
        return len(self.recent) == RECENT and self.validation is not None


def is_whole(value: Any) -> TypeGuard[int]:
    """Return whether a value of a JSON file is a whole number that a float can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST_STEP


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value of a JSON file is a number that a float can hold."""
    return is_whole(value) or isinstance(value, float)


def _end_of(descriptor: int, size: int, most: int) -> _End:
    """Read the last `most` bytes backwards. Lines that contribute nothing are not parsed as JSON, which is slow."""
    start = max(0, size - most)
    text = os.pread(descriptor, most, start)
    found, seen, is_last, end = _End(), set[int](), True, len(text)
    while end >= 0 and not found.is_whole:
        if len(found.recent) == RECENT:
            at = text.rfind(_VALIDATION.encode(), 0, end)
            if at < 0:
                break
            following = text.find(b"\n", at, end)
            end = following if following >= 0 else end
        begin = text.rfind(b"\n", 0, end) + 1
        if start and not begin:  # it began in the midst of a line
            break
        line, end = text[begin:end], begin - 1
        torn, is_last = is_last, False
        if not line:
            continue
        record = value_of(line)
        if record is None:
            found.damaged += not torn
            continue
        step = record.get("step")
        if not (is_whole(step) and is_number(record.get("loss"))):
            raise UserError("records.jsonl: a record has a whole number `step` and a number `loss`")
        if step in seen:  # a resumed run wrote it twice: the last counts
            continue
        seen.add(step)
        found.step = step if found.step is None else found.step
        if record.get("left_out") is None and len(found.recent) < RECENT:
            found.recent.append(record)
        metrics = record.get("metrics")
        if found.validation is None and isinstance(metrics, Mapping) and is_number(value := metrics.get(_VALIDATION)):
            found.validation = step, float(value)
    return found


def _worst(losses: list[float]) -> float | None:
    """Return the mean if one of the losses is not finite, NaN before an infinity; None if there is none."""
    return math.nan if any(map(math.isnan, losses)) else math.inf if losses else None


def _median(values: list[float]) -> float | None:
    """Return the middle value, the lower one of two; None if there is none."""
    return sorted(values)[(len(values) - 1) // 2] if values else None
