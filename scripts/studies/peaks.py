"""Run a command of a checkout, and sample the memory of all its processes while it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

SAMPLE_SECONDS = 0.5
# The time between samples is at least this multiple of a sample's own time: a sample of 20 GB takes 0.2 s.
APART = 9


def lockstep(root: Path, folder: Path, *words: str, ends: Collection[int] = (0,)) -> dict[str, Any]:
    """Run a command of a checkout; return its seconds, its CPU seconds and the peak of its processes' PSS in bytes.

    `own`: the peak of its own process. `ranks`: the peak of each rank's processes, if it starts ranks. Its temporary
    files are in `folder`. Raises RuntimeError if its exit code is not one of `ends`.
    """
    log, peak, own, started = folder / "log.txt", 0, 0, time.monotonic()
    of_ranks: dict[int, int] = {}
    before = os.times()
    with log.open("wb") as out:
        command = [sys.executable, "-m", "lockstep", *words]
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_WAIT_POLICY": "PASSIVE", "JAX_PLATFORMS": "cpu"}
        environment["TMPDIR"] = str(folder)
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None:
            sampled = time.monotonic()
            now = {one: pss(one) for one in tree(process.pid)}
            peak, own = max(peak, sum(now.values())), max(own, now[process.pid])
            by_rank: dict[int, int] = {}
            for one, size in now.items():
                if (rank := rank_of(one)) is not None:
                    by_rank[rank] = by_rank.get(rank, 0) + size
            of_ranks |= {rank: max(size, of_ranks.get(rank, 0)) for rank, size in by_rank.items()}
            time.sleep(max(SAMPLE_SECONDS, APART * (time.monotonic() - sampled)))
    if process.returncode not in ends:
        raise RuntimeError(f"lockstep {' '.join(words)} ended with {process.returncode}:\n{log.read_text()[-2000:]}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    found = {"seconds": time.monotonic() - started, "cpu_seconds": cpu, "peak": peak, "own": own}
    return found | ({"ranks": [of_ranks[rank] for rank in sorted(of_ranks)]} if of_ranks else {})


def tree(root: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
        except OSError:  # it has ended
            continue
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


def pss(process: int) -> int:
    """Return the proportional set size in bytes; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def rank_of(process: int) -> int | None:
    """Return the rank that torchrun gave a process or its parent; None if there is none."""
    try:
        environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")), None)
