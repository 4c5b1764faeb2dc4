"""A trial: `lockstep train` in a process of its own, started, resumed after a kill, and ended by the pruner."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.core.errors import UserError
from lockstep.core.files.lock import FolderLock
from lockstep.core.run.layout import CHECKPOINTS, RECORDS, is_run
from lockstep.core.sweep.outcome import FAILED, Outcome, decision_of, read_outcome
from lockstep.core.sweep.prune import NONE, Rule

POLL_SECONDS = 0.2
# A trial that was killed so often is given up.
RESTARTS = 5
# Exit codes of `lockstep train`.
DISAGREED, COULD_NOT, INTERRUPTED = 1, 2, 130
# How `lockstep train` ends where another process has the run.
BUSY = "is being written by another process"
TAKEN = (BUSY, "holds a run already")
# Last bytes of a log that are searched for the reason of a failure.
_TAIL = 1 << 16


@dataclass(frozen=True)
class Job:
    """A trial to make, as plain data: it may be sent to another machine that sees the same folders.

    run, log: its directory and what it prints, below `folder` where they are relative. words: after `lockstep`, to
    begin it; resume: to go on with it. rule: how it is pruned.
    validated: whether it has a validation loss. environment: variables that are set, or taken away where None.
    """

    name: str
    run: str
    log: str
    words: tuple[str, ...]
    resume: tuple[str, ...]
    rule: Rule
    validated: bool
    folder: str
    environment: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """Return the command line that begins this trial by hand."""
        return f"lockstep {shlex.join(self.words)}"


@dataclass(frozen=True)
class End:
    """The end of a trial's processes. stopped: by the sweep's own end. failure: why it cannot go on, or empty."""

    stopped: bool = False
    failure: str = ""
    restarts: int = 0


class Records:
    """The records of a run that another process writes, read on from where the last call ended."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""
        self.lines: dict[int, dict[str, Any]] = {}

    def update(self) -> bool:
        """Read what was appended; return whether there was anything. A file that became shorter is read anew."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._at:
                    self._at, self._rest, self.lines = 0, b"", {}
                file.seek(self._at)
                raw = file.read()
        except OSError:
            return False
        self._at += len(raw)
        *whole, self._rest = (self._rest + raw).split(b"\n")
        for line in whole:
            try:
                value = json.loads(line)
                self.lines[int(value["step"])] = value
            except (ValueError, TypeError, KeyError, RecursionError):
                continue  # `read_outcome` judges damaged lines; this one only decides on an early stop
        return bool(whole)


def supervise(job: Job, stop: Callable[[], bool]) -> End:
    """Run a trial to its end: start or resume it, again after each kill, and stop it where it is pruned.

    A process that an earlier sweep left behind, and that still writes the run, is waited for.
    """
    # A worker of Ray runs in the folder that its machine's Ray was started in.
    run = Path(job.folder, job.run)
    restarts = 0
    while True:
        if not _wait_until_free(run, stop):
            return End(stopped=True, restarts=restarts)
        if _is_over(read_outcome(run, job.rule)):
            return End(restarts=restarts)
        code, given_up = _train(job, _words(job, run), stop)
        if given_up or code in (0, DISAGREED):
            alarmed = code == DISAGREED and not given_up and not _is_over(read_outcome(run, job.rule))
            return End(failure="a parity check disagreed, and the run stopped" if alarmed else "", restarts=restarts)
        if stop():
            return End(stopped=True, restarts=restarts)
        reason = _reason(Path(job.folder, job.log)) if code == COULD_NOT else ""
        # A process of an earlier sweep that was still loading took the run meanwhile.
        if code == COULD_NOT and not any(words in reason for words in TAKEN):
            return End(failure=reason, restarts=restarts)
        restarts += 1
        if restarts > RESTARTS:
            return End(failure=f"its process was killed {restarts} times (the last time: {_ending(code)})")


def _is_over(outcome: Outcome) -> bool:
    return outcome.state not in ("waiting", "running") and not (outcome.state == FAILED and outcome.step == 0)


def _words(job: Job, run: Path) -> Sequence[str]:
    if not is_run(run):
        return job.words
    return job.resume if any((run / CHECKPOINTS).glob("step_*")) else (*job.words, "--overwrite")


def _train(job: Job, words: Sequence[str], stop: Callable[[], bool]) -> tuple[int, bool]:
    """Run one process of the trial; return its exit code and whether the pruner gave the trial up."""
    environment = {**os.environ, **{k: v for k, v in job.environment.items() if v is not None}}
    for name in (name for name, value in job.environment.items() if value is None):
        environment.pop(name, None)
    log = Path(job.folder, job.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    records = Records(Path(job.folder, job.run) / RECORDS)
    given_up = told = False
    with log.open("ab") as out:
        out.write(f"$ lockstep {shlex.join(words)}\n".encode())
        out.flush()
        # In a session of its own: Ctrl-C reaches the sweep alone, which ends its trials in order.
        process = subprocess.Popen(
            [sys.executable, "-m", "lockstep", *words],
            cwd=job.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                if records.update() and job.rule.pruner != NONE and not given_up:
                    lines = [records.lines[step] for step in sorted(records.lines)]
                    given_up = decision_of(job.rule, lines, job.validated).step is not None
                if (given_up or stop()) and not told:
                    process.send_signal(signal.SIGTERM)
                    told = True
                time.sleep(POLL_SECONDS)
        except BaseException:
            process.terminate()
            process.wait()
            raise
    return process.returncode, given_up


def _is_busy(run: Path) -> bool:
    try:
        FolderLock(run).release()
    except UserError as error:
        return BUSY in str(error)
    return False


def _wait_until_free(run: Path, stop: Callable[[], bool]) -> bool:
    while is_run(run) and _is_busy(run):
        if stop():
            return False
        time.sleep(POLL_SECONDS)
    return True


def _ending(code: int) -> str:
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        return f"exit code {code}"


def _reason(log: Path) -> str:
    """Return the last line of a log that `lockstep` wrote: the reason why it ended."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        lines = []
    said = [line.removeprefix("lockstep: ") for line in lines if line.startswith("lockstep: ")]
    return said[-1] if said else f"exit code {COULD_NOT}; see {log.name}"
