"""Split the time of one step into parts, without an additional synchronisation of the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.torch_backend.tools.compile_time import COMPILE_TIME

BEGIN, REDUCING, ACCUMULATED = "begin", "reducing", "accumulated"


class StepTimer:
    """Marks on the timeline of a step: the host's time, and on CUDA an event on the current stream.

    Events are read at the end of the step, after its only synchronisation, when they are all complete, so that reading
    them does not block.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = 0.0
        self._marks: dict[str, float] = {}
        self._compiled: dict[str, float] = {}
        self._events: dict[str, torch.cuda.Event] = {}
        self._excluded: dict[str, float] = {}
        self._found: dict[str, float] = {}

    def begin(self) -> None:
        """Start a step, and clear the marks of the step before."""
        self._marks, self._excluded, self._found = {}, {}, {}
        self._started = time.perf_counter()
        self.mark(BEGIN)

    def mark(self, name: str) -> None:
        """Set the mark `name` to now; an earlier mark of that name is replaced."""
        self._marks[name], self._compiled[name] = time.perf_counter(), COMPILE_TIME.seconds
        if self._device.type == "cuda":
            if name not in self._events:
                self._events[name] = torch.cuda.Event(enable_timing=True)
            self._events[name].record()

    @contextmanager
    def exclude(self, part: str) -> Iterator[None]:
        """Add the time inside the context, which reads tensors, to `part`; synchronise the device at both ends."""
        self._wait()
        started = time.perf_counter()
        yield
        self._wait()
        self._excluded[part] = self._excluded.get(part, 0.0) + time.perf_counter() - started

    def end(self) -> None:
        """End the step, after the device was synchronised since ACCUMULATED."""
        total = time.perf_counter() - self._started - sum(self._excluded.values())
        both = self._between(BEGIN, ACCUMULATED)
        communication = self._between(REDUCING, ACCUMULATED) if REDUCING in self._marks else 0.0
        compiled = self._compiled[ACCUMULATED] - self._compiled[BEGIN]
        compute = max(0.0, both - communication - compiled)
        rest = max(0.0, total - both - (COMPILE_TIME.seconds - self._compiled[ACCUMULATED]))
        self._found = {"compute": compute, "communication": communication, "optimizer": rest, **self._excluded}

    def take(self) -> dict[str, float]:
        """Return the seconds of the last step by part, and clear them; {} for a step without marks.

        - compute: forward and backward pass
        - communication: from the last gradients of this rank to the end of their sum over ranks
        - optimizer: norm, clipping and update, and any wait for the update of the step before
        - parts of `exclude`, under their own names

        Together they are the host's time from `begin` to `end`, without that of torch.compile.
        """
        found, self._found = self._found, {}
        return found

    def _between(self, first: str, last: str) -> float:
        if self._device.type == "cuda":
            return self._events[first].elapsed_time(self._events[last]) / 1000
        return self._marks[last] - self._marks[first]

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
