"""Processes that stay alive side by side and take their steps in turns, so that other work disturbs all alike."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from lockstep.core.errors import UserError


class Side:
    """A contender's process. It reads a job as a line of JSON, then `go` for each step and `end`; answers in lines.

    Answers go to its standard output; all other output goes to `log`.
    Raises UserError with the contender's name if the process reports an error, dies, or does not answer in time.
    """

    def __init__(self, name: str, command: Sequence[str], root: Path, log: IO[str], environment: Mapping[str, str]):
        self.name = name
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
            start_new_session=True,
        )
        self._rest = b""

    def ask(self, message: str, limit: float) -> dict[str, Any]:
        """Send a line, and return the answer. Raises UserError if the process has ended, or as `answer` does."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(message.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise UserError(f"{self.name}: its process ended") from None
        return self.answer(limit)

    def answer(self, limit: float) -> dict[str, Any]:
        """Read the next line that the process prints. Raises UserError after `limit` seconds."""
        assert self._process.stdout is not None
        ends = time.monotonic() + limit
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._process.stdout], [], [], max(ends - time.monotonic(), 0.0))
            if not ready:
                raise UserError(f"{self.name}: no answer for {limit:.0f} s")
            read = os.read(self._process.stdout.fileno(), 65536)
            if not read:
                raise UserError(f"{self.name}: its process ended with {self._process.wait()} and no answer")
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        found = dict(json.loads(line))
        if "error" in found:
            raise UserError(f"{self.name}: {found['error']}")
        return found

    def close(self) -> None:
        """End the process and all its children."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def in_turns(
    sides: Sequence[Side], warmup: int, rounds: int, seconds: float, limit: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return seconds of each counted step and losses of all steps, by contender, as `answers_in_turns` takes them."""
    said = answers_in_turns(sides, warmup, rounds, seconds, limit)
    taken = {name: [answer["seconds"] for answer in answers[warmup:]] for name, answers in said.items()}
    return taken, {name: [answer["loss"] for answer in answers] for name, answers in said.items()}


def answers_in_turns(
    sides: Sequence[Side], warmup: int, rounds: int, seconds: float, limit: float, message: str = "go"
) -> dict[str, list[dict[str, Any]]]:
    """Return the answers to `message`, those of `warmup` rounds first, by contender.

    In each round every contender makes one step; each round begins with the next contender. After `seconds` no round
    begins, but at least one is counted. limit: seconds that one step may take, compilation included.
    """
    said: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    started = time.monotonic()
    for number in range(warmup + rounds):
        if number == warmup:
            started = time.monotonic()
        elif number > warmup and time.monotonic() - started > seconds:
            break
        first = number % len(sides)
        for side in (*sides[first:], *sides[:first]):
            said[side.name].append(side.ask(message, limit))
    return said
