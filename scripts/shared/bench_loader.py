"""A contender of `lockstep bench data` in a process of its own (core/bench/turns.py defines the protocol).

Messages: `go` takes some batches; `first N` opens the data anew and makes the first batch from sample N on; `parts`
times a batch's parts; `end`.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

from lockstep.scripts.shared.in_lines import say, work_in_lines

_PART_BATCHES = 500
_TRIES = 3


class Contender:
    """A maker of batches, each on request; `answer` returns seconds."""

    def __init__(self, job: dict[str, Any]) -> None:
        module, _, name = job["program"].partition(":")
        if module.startswith("lockstep.torch_backend"):
            import torch

            torch.set_num_threads(1)
        self._made: type = getattr(importlib.import_module(module), name)
        self._given = (Path(job["folder"]), job["sequences"], job["length"])
        self._loader: Any = None
        self._turn, self._seeds = job["turn"], job["seeds"]
        self._batches = 1

    def answer(self, message: str) -> dict[str, Any]:
        """Return the answer to a message."""
        if message.startswith("first "):
            return self._first(int(message.partition(" ")[2]))
        if self._loader is None:
            self._loader = self._made(*self._given)
            self._settle()
        if message == "parts":
            return {"parts": self._loader.seconds_by_part(_PART_BATCHES)}
        return {"seconds": self._take() / self._batches, "batches": self._batches}

    def _settle(self) -> None:
        """Choose the number of batches a turn, after workers have started and files are in memory."""
        self._loader.take(1)
        # The fastest of several: a moment of other work on the core would make all turns too short.
        while (taken := min(self._take() for _ in range(_TRIES))) < self._turn:
            self._batches = max(self._batches + 1, min(4 * self._batches, round(self._batches * self._turn / taken)))

    def _take(self) -> float:
        began = time.perf_counter()
        self._loader.take(self._batches)
        return time.perf_counter() - began

    def _first(self, sample: int) -> dict[str, Any]:
        # A new order each time, so that nothing is cached from earlier times.
        given = (sample, self._seeds.pop()) if self._seeds else (sample,)
        began = time.perf_counter()
        loader = self._made(*self._given, *given)
        opened = time.perf_counter()
        loader.take(1)
        return {"seconds": time.perf_counter() - began, "opened": opened - began}


def serve(job: dict[str, Any], out: IO[str]) -> None:
    """Serve requests until `end`; every answer is a line of JSON."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {job["core"]})
    contender = Contender(job)
    found: dict[str, Any] = {"ready": True}
    while True:
        say(found, out)
        message = sys.stdin.readline().strip()
        if message in ("", "end"):
            return
        found = contender.answer(message)


if __name__ == "__main__":
    work_in_lines(serve)
