"""Recording of training steps, by PyTorch's profiler or by Nsight Systems, which runs outside of the process."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lockstep.core.backend import Batch
from lockstep.core.errors import UserError
from lockstep.torch_backend.session import TorchSession
from lockstep.torch_backend.tools import nvtx
from lockstep.torch_backend.tools.bench import memory

# Numbers of steps: before the profiler starts (the first compiles programs), its warm-up, recorded, and timed after it.
SKIPPED, WARM, KEPT, TIMED = 2, 3, 3, 3
STEPS = SKIPPED + WARM + KEPT + TIMED


def record(session: Any, own: TorchSession, batches: Iterator[Batch], trace: Path) -> dict[str, Any]:
    """Record KEPT steps into the file `trace`, in Chrome's format, compressed if its name ends with .gz.

    session: the session that steps. own: the session of this rank; with one rank, the same object. Returns
    `step_seconds`, the mean over TIMED further steps without the profiler, and `memory` in bytes
    (torch_backend/tools/bench.py). Raises UserError if the trace cannot be written.
    """
    cuda = own.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    plan = schedule(skip_first=SKIPPED, wait=0, warmup=WARM, active=KEPT, repeat=1)
    before, own.trace = own.trace, nvtx.recorded
    try:
        with profile(
            activities=activities,
            schedule=plan,
            acc_events=True,
            on_trace_ready=lambda done: done.export_chrome_trace(str(trace)),
        ) as profiler:
            for _ in range(SKIPPED + WARM + KEPT):
                _step(session, own, batches)
                profiler.step()
    except (OSError, RuntimeError) as error:
        if trace.exists() or not isinstance(error, OSError):
            raise
        raise UserError(f"cannot write {trace}: {error.strerror or error}") from error
    finally:
        own.trace = before
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    gc.collect()
    started = time.perf_counter()
    for _ in range(TIMED):
        _step(session, own, batches)
    seconds = (time.perf_counter() - started) / TIMED
    return {"step_seconds": seconds, "memory": memory(own, cuda)}


def unrecorded(session: Any, batches: Iterator[Batch]) -> None:
    """Run the steps of `record` on a rank that is not profiled."""
    for _ in range(STEPS):
        session.step(next(batches))


def under_nsight(session: Any, own: TorchSession, batches: Iterator[Batch]) -> float:
    """Run the same steps with NVTX ranges, KEPT of them for Nsight Systems; return the mean seconds of these.

    Nsight Systems records from cudaProfilerStart to cudaProfilerStop (`--capture-range=cudaProfilerApi`). Raises
    UserError on the CPU.
    """
    if own.device.type != "cuda":
        raise UserError("nvtx: Nsight Systems records CUDA, and this run is on the CPU; leave --nvtx out")
    own.trace = nvtx.nvtx
    for _ in range(SKIPPED + WARM):
        _step(session, own, batches)
    started = time.perf_counter()
    with torch.cuda.profiler.profile():
        for _ in range(KEPT):
            _step(session, own, batches)
    return (time.perf_counter() - started) / KEPT


def _step(session: Any, own: TorchSession, batches: Iterator[Batch]) -> None:
    with own.trace("data"):
        batch = next(batches)
    session.step(batch)
    if own.device.type == "cuda":
        # Synchronise, so that the device's work belongs to its step.
        torch.cuda.synchronize(own.device)
