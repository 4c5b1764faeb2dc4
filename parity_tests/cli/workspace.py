"""Run the command line, in this process or in a new one, and read the files of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.files.jsonl import read_lines
from lockstep.parity_tests.stored import weights_of

REPO = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Done:
    """The result of a finished command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """Return the lines of stderr."""
        return self.err.splitlines()


def records(run: Path) -> list[dict[str, Any]]:
    """Return the records of records.jsonl."""
    return read_lines(run / "records.jsonl")


def checks(run: Path) -> list[dict[str, Any]]:
    """Return the checks of parity.jsonl."""
    return read_lines(run / "parity.jsonl")


def trained(run: Path) -> list[tuple[Any, ...]]:
    """Return the fields of each step that must be equal bit for bit."""
    return [(r["step"], r["digest"], r["loss"], r["lr"], r["grad_norm"], r["clip_coefficient"]) for r in records(run)]


def last_weights(run: Path) -> bytes:
    """Return the bytes of the last checkpoint's parameters."""
    return weights_of(max((run / "checkpoints").iterdir()))


class Started:
    """A running `lockstep`, in its own process group, as a terminal starts it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._folder = folder
        self._out, self._err = folder / "stdout.txt", folder / "stderr.txt"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lockstep", *arguments],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(REPO)},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait_for(self, what: Callable[[], bool], seconds: float = 120) -> None:
        """Wait until `what()` is true. Fail if the process ends first, or after `seconds`."""
        end = time.monotonic() + seconds
        while not what():
            assert self.process.poll() is None, self._err.read_text() + self._out.read_text()
            assert time.monotonic() < end, f"not within {seconds} s"
            time.sleep(0.01)

    def wait_for_step(self, run: Path, step: int) -> None:
        """Wait until step `step` is recorded."""
        path = run / "records.jsonl"
        self.wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= step)

    def interrupt(self) -> None:
        """Send SIGINT to all processes of the group, as Ctrl-C does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def worker(self) -> int:
        """Return the process id of the reference's worker."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
                if parent == self.process.pid and b"spawn_main" in (stat.parent / "cmdline").read_bytes():
                    return int(stat.parent.name)
            except OSError:
                continue
        raise AssertionError("there is no worker")

    def end(self, seconds: float = 120) -> Done:
        """Wait until the process ends; return its result."""
        code = self.process.wait(seconds)
        return Done(code, self._out.read_text(), self._err.read_text())


def alive(pid: int) -> bool:
    """Return whether the process runs. A zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
