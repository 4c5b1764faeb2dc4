"""A preparation on Ray on this machine, in a process of its own, which a test or a study starts.

`python -m lockstep.scripts.studies.on_ray SETTINGS` with a JSON object: out, source, workers, kill (numbers of
reports of progress at which a worker dies), engine ("local" for processes), and settings of `prepare`. The last line
of its output is a JSON object: seconds, start (seconds before the first shard), redone, written, kept, killed; or
error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lockstep.core.data.engines.processes import Processes
from lockstep.core.data.engines.ray_tasks import RayTasks
from lockstep.core.data.prepare import PrepareSettings, Progress, prepare
from lockstep.core.errors import UserError


def workers_at_work(root: int) -> list[int]:
    """Return the process ids of Ray's workers below the process `root` that are working on a part."""
    return [process for process in below(root) if title(process).startswith("ray::_compute")]


def kill_one(root: int, number: int) -> int:
    """Kill the `number`-th busy worker during its part; return its process id."""
    while True:
        at_work = workers_at_work(root)
        if at_work:
            process = at_work[number % len(at_work)]
            # A stopped process cannot finish its part between the last test and the kill.
            os.kill(process, signal.SIGSTOP)
            if title(process).startswith("ray::_compute"):
                os.kill(process, signal.SIGKILL)
                return process
            os.kill(process, signal.SIGCONT)
        time.sleep(0.002)


def main(arguments: dict[str, Any]) -> dict[str, Any]:
    """Prepare; see the module."""
    workers, kill = arguments.pop("workers"), arguments.pop("kill", [])
    local = arguments.pop("engine", "ray") == "local"
    reports, start = 0, 0.0
    kills: list[Future[int]] = []
    # In a thread, while the driver hands out the next parts.
    pool = ThreadPoolExecutor(1)

    def on_progress(progress: Progress) -> None:
        nonlocal reports, start
        if progress.stage == "encode":
            start = start or time.perf_counter() - began
            if reports in kill:
                kills.append(pool.submit(kill_one, os.getpid(), reports))
            reports += 1

    began = time.perf_counter()
    try:
        with RayTasks(workers, arguments.pop("address", None)) as engine:
            settings = PrepareSettings(**arguments)
            result = prepare(settings, on_progress, Processes(workers) if local else engine)
    except UserError as error:
        return {"error": str(error)}
    seconds = time.perf_counter() - began
    pool.shutdown(wait=False, cancel_futures=True)
    killed = sum(kill.done() for kill in kills)
    written, kept = result.shards_written, result.shards_kept
    found = {"seconds": seconds, "start": start, "redone": engine.redone}
    return {**found, "written": written, "kept": kept, "killed": killed}


def below(root: int) -> Iterator[int]:
    """Yield the process ids of all processes that descend from `root`."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(stat.read_text().rsplit(")", 1)[1].split()[1]), []).append(int(stat.parent.name))
        except OSError:
            continue
    waiting = [root]
    while waiting:
        children = parents.get(waiting.pop(), [])
        waiting.extend(children)
        yield from children


def title(process: int) -> str:
    """Return a process's command line from /proc; empty if there is no such process."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
