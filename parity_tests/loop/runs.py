"""Tiny runs through the command line, in this process, or in another one that tests send signals to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.backend import Arrays
from lockstep.core.files.jsonl import read_lines
from lockstep.core.run.directory import RunDir
from lockstep.parity_tests.repository import REPO
from lockstep.parity_tests.stored import weights_of
from lockstep.scripts import cli

STEPS = 12
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "model.vocab_size": 300,
    "model.hidden": 64,
    "model.layers": 2,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.ffn_hidden": 128,
    "train.steps": STEPS,
    "train.batch_size": 4,
    "train.micro_batch_size": 2,
    "train.sequence_length": 32,
    "optim.warmup_steps": 3,
    "compile.enabled": False,
    "eval.every": 0,
    "eval.batches": 1,
    "log.norms_every": 0,
    "log.fp32_loss_every": 0,
    "log.memory_every": 0,
    "log.attention_logits_every": 0,
}
COMPILED = {"compile.enabled": True, "compile.backend": "aot_eager"}
INDUCTOR = {"compile.enabled": True, "compile.backend": "inductor"}


class Folder:
    """A folder with run directories that share one data set."""

    def __init__(self, path: Path, data: Path) -> None:
        self.path = path
        self.data = data
        self.file = path / "run.toml"
        self.file.write_text("")

    def arguments(self, name: str, settings: dict[str, Any]) -> list[str]:
        """Return the command-line arguments of `lockstep` for a new run."""
        told = SETTINGS | {"data.path": self.data, "name": name} | settings
        words = ["train", str(self.file), "--out", str(self.path)]
        for key, value in told.items():
            words += [f"--{key}", str(value).lower() if isinstance(value, bool) else str(value)]
        return words

    def train(self, name: str, settings: dict[str, Any] | None = None, *more: str) -> int:
        """Train a new run in this process; return the exit code."""
        return cli.run([*self.arguments(name, settings or {}), *more])

    def resume(self, name: str, *more: str) -> int:
        """Resume a run in this process; return the exit code."""
        return cli.run(["train", "--resume", str(self.path / name), *more])

    def start(self, name: str, settings: dict[str, Any] | None = None) -> subprocess.Popen[str]:
        """Start a new run in another process, slowed down so that it can be interrupted at any step."""
        return subprocess.Popen(
            [sys.executable, "-m", "lockstep.parity_tests.loop.slowly", *self.arguments(name, settings or {})],
            cwd=REPO,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def stop(
        self, name: str, settings: dict[str, Any], number: signal.Signals, after: int, saved: bool = False
    ) -> tuple[int, str, str]:
        """Start a run and send it a signal when `after` records exist; return exit code, stdout and stderr.

        saved: wait for a complete checkpoint as well, which is written during the steps after it.
        """
        process = self.start(name, settings)
        try:
            self.wait(process, name, after)
            while saved and not self.run(name).checkpoints() and process.poll() is None:
                time.sleep(0.02)
            process.send_signal(number)
            out, error = process.communicate(timeout=60)
        finally:
            process.kill()
        return process.returncode, out, error

    def wait(self, process: subprocess.Popen[str], name: str, records: int) -> None:
        """Wait until the run has `records` records. Fail if the process ends first, or after five minutes.

        From an empty cache, Inductor took 50 to 70 s on two cores without AVX-512.
        """
        deadline = time.monotonic() + 300
        while len(self.records(name)) < records:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise AssertionError(f"no {records} records: {process.communicate(timeout=5)}")
            time.sleep(0.02)

    def run(self, name: str) -> RunDir:
        """Open the run directory for reading."""
        return RunDir.open(self.path / name)

    def records(self, name: str) -> list[dict[str, Any]]:
        """Return the run's records so far."""
        path = self.path / name / "records.jsonl"
        return read_lines(path) if path.exists() else []

    def losses(self, name: str) -> list[tuple[int, float]]:
        """Return (step, loss) of each record."""
        return [(r["step"], r["loss"]) for r in self.records(name)]

    def weights(self, name: str) -> bytes:
        """Return the bytes of the weights in the last checkpoint."""
        last = self.run(name).latest_checkpoint()
        assert last is not None
        return weights_of(last)


def one_line(text: str) -> str:
    """Return the only line of `text`; fail if it has more or none."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]


def alive(pid: int) -> bool:
    """Return whether a process runs. A zombie counts as ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        if Path("/proc/self").exists():
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    return state not in "ZX"


def wait_until_gone(pid: int, seconds: float = 10.0) -> bool:
    """Return whether the process ends within `seconds`."""
    deadline = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def equal(a: Arrays, b: Arrays) -> bool:
    """Return whether two sets of arrays hold the same bits."""
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
