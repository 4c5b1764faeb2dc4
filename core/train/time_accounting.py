"""Account for the time of a run: all time between two records is assigned to exactly one part.

The parts of a record add up to the time since the record before it. Time after a record (checkpoints, messages) belongs
to the next record. The accounting does not synchronise the device: its times come from the session (`Timed`). The time
of compilation (`TimesCompilation`) is a part of its own, wherever a program is compiled: in a step, or in the first
check, which may run the step's program before the step does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from lockstep.core.train.metrics import SECONDS

# The parts, in the order of tables. data: wait for the loader. compute: forward and backward pass. compilation: making
# programs, in any part. communication: wait for the sum over ranks. optimizer: norm, clipping, update. checks: evidence
# and alarms. validation: validation loss, FP32 loss, attention logits, samples. logging: norms by group, sinks.
# checkpoint: the part of writing one that blocks training. other: the remaining time.
PARTS = (
    "data",
    "compute",
    "compilation",
    "communication",
    "optimizer",
    "checks",
    "validation",
    "logging",
    "checkpoint",
    "other",
)


class TimeAccounting:
    """A stopwatch for one thread. Parts may be nested; the time of an inner part does not count for the outer one.

    compiling: returns the seconds that compilation has taken so far. They count as `compilation`, not for the open
    part.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, compiling: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._clock, self._compiling = clock, compiling
        self._at, self._compiled = clock(), compiling()
        self._open = ["other"]
        self._spent = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time inside the context to `name`."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def split_step(self, told: Mapping[str, float], rest: str) -> None:
        """Divide the time of `compute` among the parts that the session reports (`Timed`), and the remainder to `rest`.

        told: part → seconds; if it is empty, nothing changes. No more time is moved than `compute` has, so that no time
        is counted twice.
        """
        if not told:
            return
        for part in PARTS:
            if part != "compute":
                self._move(part, told.get(part, 0.0))
        self._move(rest, self._spent["compute"] - told.get("compute", 0.0))

    def lap(self) -> dict[str, float]:
        """Return the seconds of each part since the last call, without zeros, under the names of a record's `host`."""
        self._charge()
        spent, self._spent = self._spent, dict.fromkeys(PARTS, 0.0)
        return {SECONDS + part: seconds for part, seconds in spent.items() if seconds > 0}

    def _move(self, part: str, seconds: float) -> None:
        moved = max(0.0, min(seconds, self._spent["compute"]))
        self._spent["compute"] -= moved
        self._spent[part] += moved

    def _charge(self) -> None:
        now, compiled = self._clock(), self._compiling()
        seconds = max(0.0, now - self._at)
        of_compilation = min(seconds, max(0.0, compiled - self._compiled))
        self._spent["compilation"] += of_compilation
        self._spent[self._open[-1]] += seconds - of_compilation
        self._at, self._compiled = now, compiled
