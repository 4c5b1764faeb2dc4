"""Measure row after row, each in a process of its own, and write the file after each, within a time limit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from lockstep.core.bench.results import Series, figures, put, result_of
from lockstep.core.bench.rows import Row
from lockstep.core.config.file import COMMAND_LINE
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.plan import GPUS, fits

# A row that takes longer than this, compilation included, counts as hung.
ROW_LIMIT = 1800.0
Job = Mapping[str, Any]
# (job, seconds that it may take) → what the process answered, at least `status` and `reason`.
Ask = Callable[[Job, float], dict[str, Any]]


class Worker:
    """A runner of jobs. It starts `command` for each; the last argument is the answer's path, the job is JSON on stdin.

    root: a folder whose modules it can import.

    The output of the process goes to `log`. It gets a process group of its own, so that whatever it starts ends with
    it.
    """

    def __init__(self, command: Sequence[str], root: Path, log: IO[str]) -> None:
        self._command, self._log = list(command), log
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

    def __call__(self, job: Job, limit: float) -> dict[str, Any]:
        """Run a job and return its answer; without one it is `failed` or, after `limit` seconds, `timed_out`."""
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder, "answer.json")
            self._log.write(f"── {job.get('row', job['job'])}\n")
            self._log.flush()
            process = subprocess.Popen(
                [*self._command, str(answer)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
            try:
                process.communicate(json.dumps(job).encode(), timeout=limit)
            except subprocess.TimeoutExpired:
                return {"status": "timed_out", "reason": f"did not finish within {limit:.0f} s"}
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if answer.exists():
                return dict(json.loads(answer.read_text()))
            return {"status": "failed", "reason": _end(process.returncode)}


def _end(code: int) -> str:
    if code == -signal.SIGKILL:
        return "its process was killed, as the system does when memory runs out"
    return f"its process ended by signal {-code}" if code < 0 else f"its process ended with {code} and no answer"


def in_one_line(text: str) -> str:
    """Cut a message to one line of 200 characters without folders: results name no machine's paths."""
    flat = " ".join(re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", text).split())
    return flat if len(flat) <= 200 else f"{flat[:199]}…"


@dataclass(frozen=True)
class Plan:
    """The settings of a measurement. warmup: steps left out. repeat: steps that count. seconds: for all; 0 = no limit.

    ignore_plan: rows that cannot fit into memory by lockstep.core.plan are measured too.
    """

    warmup: int = 3
    repeat: int = 10
    seconds: float = 0.0
    resume: bool = False
    ignore_plan: bool = False


def to_do(rows: Sequence[Row], series: Series, resume: bool, ignore_plan: bool = False) -> list[Row]:
    """List the rows to measure; when resuming, skip those already measured, and put those that timed out last.

    ignore_plan: also measure a row that the plan leaves out.
    """
    if not resume:
        return list(rows)
    status = {row.name: (result_of(series, row.name) or {}).get("status") for row in rows}
    first = (None, "does_not_fit") if ignore_plan else (None,)
    return [r for r in rows if status[r.name] in first] + [r for r in rows if status[r.name] == "timed_out"]


def cannot_fit(config: RunConfig, device: Mapping[str, Any]) -> str | None:
    """Return why a row does not fit into the device's memory by the plan (core/plan); None if it may.

    device: facts of torch_backend/tools/bench.py; a device without `memory_bytes` has no limit. The plan does not
    estimate `recompute.memory_budget`.
    """
    there = device.get("memory_bytes")
    if not there or config.recompute.memory_budget < 1:
        return None
    # Any GPU will do: a step's allocations do not depend on the GPU.
    estimate = fits(config, replace(GPUS["h100"], memory=there))
    if estimate.fits:
        return None
    return (
        f"the plan: {estimate.memory.peak / 1e9:.1f} GB allocated and {estimate.peak / 1e9:.1f} GB in all, of "
        f"{there / 1e9:.1f} GB; --ignore-plan measures it all the same"
    )


def measure_rows(
    rows: Sequence[Row],
    series: Series,
    configure: Callable[[Row], RunConfig],
    ask: Ask,
    plan: Plan,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[dict[str, Any]]:
    """Measure rows and put each result into the series; yields it. Ends early when another row would not fit.

    The next row is expected to take as long as the longest one so far, earlier rows of the series included.
    configure: the row's configuration; a UserError of it is the row's result.
    """
    started = clock()
    for row in to_do(rows, series, plan.resume, plan.ignore_plan):
        longest = max((r.get("wall_seconds", 0.0) for r in series["rows"]), default=0.0)
        left = plan.seconds - (clock() - started) if plan.seconds else ROW_LIMIT
        if left <= (longest if plan.seconds else 0.0):
            return
        began = clock()
        result = measure_row(row, series, configure, ask, plan, min(left, ROW_LIMIT))
        result["wall_seconds"] = round(clock() - began, 1)
        put(series, result)
        yield result


def measure_row(
    row: Row, series: Series, configure: Callable[[Row], RunConfig], ask: Ask, plan: Plan, limit: float
) -> dict[str, Any]:
    """Return one row's result but for its wall time (core/bench/results.py lists its contents)."""
    result: dict[str, Any] = {
        "row": row.name,
        "status": "refused",
        "reason": None,
        "settings": dict(row.settings),
        "micro_batch": row.sequences,
        "tokens": [row.sequences * row.accumulation, series["config"]["sequence_length"]],
    }
    try:
        config = configure(row)
    except UserError as error:
        return result | {"reason": in_one_line(str(error).removeprefix(f"{COMMAND_LINE}: "))}
    if not plan.ignore_plan and (reason := cannot_fit(config, series["device"])):
        return result | {"status": "does_not_fit", "reason": reason}
    job = {
        "job": "row",
        "row": row.name,
        "config": config.model_dump(mode="json"),
        "warmup": plan.warmup,
        "repeat": plan.repeat,
    }
    result |= {"reason": None} | ask(job, limit)
    if result["status"] != "measured":
        return result
    return result | figures(config, result["seconds"], series["device"], series["floor"])
