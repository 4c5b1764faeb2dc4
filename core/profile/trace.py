"""A trace of PyTorch's profiler: events in Chrome's format, as Kineto writes them (times in microseconds)."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import read_whole
from lockstep.core.profile.intervals import Span

# The work of a GPU, and a program's calls for it.
KERNEL, COPIES, CALLS = "kernel", ("gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
OPERATOR, RANGE = "cpu_op", "user_annotation"
# Names of ranges: a step of the profiler's own, and the parts of a step (torch_backend/tools/nvtx.py).
STEP, PART = "ProfilerStep#", "lockstep."
GZIP = b"\x1f\x8b"
# How many times smaller gzip makes a trace, at most: 10 to 30 times is usual, 1000 is what gzip can do.
MOST_PACKED = 200


@dataclass(frozen=True)
class Event:
    """An interval of a trace. lane: the thread, or the GPU's stream, that it is of. Times in µs."""

    name: str
    category: str
    start: float
    stop: float
    lane: tuple[Any, Any] = (0, 0)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def span(self) -> Span:
        """The interval (start, stop)."""
        return self.start, self.stop


def read_trace(path: Path) -> list[Event]:
    """Read the events of a trace, gzip or not, by their starts. Raises UserError if it is none, or holds none."""
    raw = read_whole(path)
    try:
        body = json.loads(_unpacked(raw, path) if raw.startswith(GZIP) else raw)
    except UserError:
        raise
    except (OSError, ValueError, RecursionError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is no trace of PyTorch's profiler: it is not JSON") from error
    listed: Any = body.get("traceEvents") if isinstance(body, dict) else body
    try:
        events = events_of(listed)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is no trace of PyTorch's profiler: it has no traceEvents of Chrome's") from error
    if not events:
        raise UserError(f"{path} holds no event that took time: nothing was profiled")
    return events


def _unpacked(raw: bytes, path: Path) -> bytes:
    """Unpack a gzip file. Raises UserError if it unpacks to so many times its size that it is no trace."""
    most = MOST_PACKED * len(raw)
    with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise UserError(
            f"{path} unpacks to more than {MOST_PACKED} times its size: no trace does; gunzip it if it is one"
        )
    return found


def events_of(listed: Iterable[Mapping[str, Any]]) -> list[Event]:
    """Return the events with a duration, by their starts; of two that start together, the longer one first."""
    found = [
        Event(
            str(one["name"]),
            str(one.get("cat", "")),
            float(one["ts"]),
            float(one["ts"]) + float(one["dur"]),
            (one.get("pid"), one.get("tid")),
            one.get("args") or {},
        )
        for one in listed
        if one.get("ph") == "X" and "dur" in one
    ]
    return sorted(found, key=lambda event: (event.start, -event.stop))
