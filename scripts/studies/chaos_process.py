"""Start a process of scripts/studies/chaos.py, kill it at a moment, and search for its child processes afterwards."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.scripts.studies.killed_at import VARIABLE, Moment
from lockstep.scripts.studies.repository import ROOT

# Seconds after which a process counts as hung, and in which its remaining processes must end: torchrun kills after 30.
HANGS, LINGERS = 300.0, 25.0
# `lockstep`, and its variant that can be killed at a given operation.
PLAIN, MODULE = "lockstep", "lockstep.scripts.studies.killed_at"


@dataclass(frozen=True)
class Ended:
    """The end of a process.

    operation: at which it was killed; None if it ended by itself. seconds_to_end: from the kill until its last process
    ended. left: processes that remained after `LINGERS`, or that hung.
    """

    code: int
    operation: str | None
    seconds_to_end: float
    left: tuple[int, ...]
    said: str


def command(module: str, words: Sequence[str], ranks: int = 1) -> list[str]:
    """Return the command of `lockstep WORDS` as a process of its own, or of torchrun's."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--module"]
    return [sys.executable, *(["-m"] if ranks == 1 else launcher), module, *words]


def run_to_end(words: list[str], folder: Path) -> Ended:
    """Run a process to its end without killing it. Raises RuntimeError if it fails."""
    ended = start(words, folder, None)
    if ended.code != 0:
        raise RuntimeError(f"exit code {ended.code}: {ended.said}")
    return ended


def start(words: list[str], folder: Path, moment: Moment | None, delay: float = 0.0, victim: int = 0) -> Ended:
    """Start a process, kill it `delay` seconds after the moment, and wait until all its processes have ended.

    victim: the rank that is killed. Its output stays in `folder`.
    """
    pipe = folder / "told"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    # Open for writing too, because a pipe without writers is always readable.
    told = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    environment = moment.environment() if moment else dict(os.environ)
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    try:
        with (folder / "stdout.txt").open("wb") as out, (folder / "stderr.txt").open("wb") as err:
            process = subprocess.Popen(
                words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        return _see_through(process, told, folder, moment, delay, victim)
    finally:
        os.close(told)


def _see_through(
    process: subprocess.Popen[bytes], told: int, folder: Path, moment: Moment | None, delay: float, victim: int
) -> Ended:
    operation, target, hung = None, 0, time.monotonic() + HANGS
    while process.poll() is None and time.monotonic() < hung:
        # Found in advance: the search takes longer than the operation to hit.
        if victim and not target:
            target = _rank(moment, victim)
        if select.select([told], [], [], 0.05)[0]:
            line = json.loads(os.read(told, 65536).splitlines()[0])
            operation = line["operation"]
            if moment is not None and not moment.at_once:
                time.sleep(delay)
                _kill(target if victim else line["pid"])
            break
    killed = time.monotonic()
    left: tuple[int, ...] = ()
    while (pids := _processes(moment, process)) and not left:
        if time.monotonic() > max(killed + LINGERS, 0 if operation else hung):
            left = tuple(pids)
            for pid in left:
                _kill(pid)
        time.sleep(0.02)
    taken = time.monotonic() - killed
    code = process.wait()
    if operation is not None and code == 0:
        operation = None  # it ended before the signal
    said = (folder / "stderr.txt").read_text(errors="replace")[-2000:]
    return Ended(code, operation, taken, left, said)


def _processes(moment: Moment | None, first: subprocess.Popen[bytes]) -> list[int]:
    """Return the process and all processes with the moment in their environment."""
    found = [first.pid] if first.poll() is None else []
    if moment is None:
        return found
    for stat in Path("/proc").glob("[0-9]*"):
        pid = int(stat.name)
        if pid != first.pid and _told(moment) in _environment(pid) and _alive(pid):
            found.append(pid)
    return found


def _rank(moment: Moment | None, rank: int) -> int:
    """Return the process of one of torchrun's ranks; 0 if there is none yet."""
    if moment is None:
        return 0
    mine = f"RANK={rank}".encode()
    for stat in Path("/proc").glob("[0-9]*"):
        environment = _environment(int(stat.name)).split(b"\0")
        if mine in environment and any(_told(moment) in entry for entry in environment):
            return int(stat.name)
    return 0


def _told(moment: Moment) -> bytes:
    """Return the environment entry that only processes of this start have."""
    return f"{VARIABLE}={json.dumps({'folder': moment.folder, 'told': moment.told})[:-1]}".encode()


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _kill(pid: int) -> None:
    if pid > 0:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
