"""Start the processes of a bench that take turns, check the options that these benches share, describe the machine."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from typing import TYPE_CHECKING

from lockstep.core.errors import UserError
from lockstep.scripts.shared.installation import HOME

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import IO, Any

    from lockstep.core.bench.turns import Side
    from lockstep.core.config.schema import RunConfig

# Seconds: starting a process, imports included; one training step, compilation included; a turn of a loader, workers
# included.
START_LIMIT, STEP_LIMIT, LOADER_LIMIT = 120.0, 300.0, 120.0
# Seconds of a turn of a loader; number of warm-up rounds.
LOADER_TURN, LOADER_WARMUP = 0.25, 1
MOST_THREADS = 1024


def check_turns(rounds: int, warmup: int, seconds: float, threads: int) -> None:
    """Raise UserError for an impossible number of steps, time or number of threads."""
    if rounds < 1 or warmup < 1:
        raise UserError("command line: rounds and warmup: each must be at least 1")
    if not 0 <= threads <= MOST_THREADS:
        raise UserError(f"command line: threads = {threads}: must be a number from 0 to {MOST_THREADS}")
    if not (math.isfinite(seconds) and seconds > 0):
        raise UserError(f"command line: seconds = {seconds}: must be a number above 0")


def start_trainer(
    name: str,
    program: str,
    config: RunConfig,
    threads: int,
    log: IO[str],
    environment: Mapping[str, str] | None = None,
    data: Mapping[str, str] | None = None,
) -> Side:
    """Start a process that trains by `program`, a step each turn, and wait until it is ready.

    environment: variables that override those of all contenders. data: `loader`, a class of core/bench/loaders.py by
    name, and the `folder` that it opens; without it batches are random and prepared ahead. Raises UserError as
    `Side.ask` does.
    """
    from lockstep.core.bench.turns import Side

    command = [sys.executable, "-P", "-m", "lockstep.scripts.shared.bench_peer"]
    own = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    own |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **(environment or {})}
    job = {"program": program, "config": config.model_dump(mode="json"), "threads": threads, "data": data}
    return _started(Side(name, command, HOME, log, own), job)


def start_loader(
    name: str, program: str, folder: Path, shape: tuple[int, int], seeds: Sequence[int], log: IO[str]
) -> Side:
    """Start a process that makes batches of a shape on the core that all loaders share, and wait until it is ready."""
    from lockstep.core.bench.turns import Side

    command = [sys.executable, "-P", "-m", "lockstep.scripts.shared.bench_loader"]
    job = {"program": program, "folder": str(folder), "sequences": shape[0], "length": shape[1]}
    job |= {"turn": LOADER_TURN, "seeds": list(seeds), "core": _core()}
    return _started(Side(name, command, HOME, log, {"OMP_NUM_THREADS": "1"}), job)


def _started(side: Side, job: Mapping[str, Any]) -> Side:
    try:
        side.ask(json.dumps(job), START_LIMIT)
    except UserError:
        side.close()
        raise
    return side


def _core() -> int:
    """Return the core that all loaders share: the last one that this process may use."""
    return max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


def about(config: RunConfig, threads: int, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return the device, the versions including further packages, and the settings that a bench of steps depends on.

    config: its device is "cpu" or "cuda".
    """
    from importlib import metadata

    from lockstep.torch_backend.tools.bench import device_facts, instructions, versions

    device = device_facts()
    if config.device == "cpu":
        device = {"kind": "cpu", "name": f"{platform.machine()} CPU", "cores": os.cpu_count()}
        device["instructions"] = instructions()
    found = versions()
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    dumped = config.model_dump(mode="json")
    settings = {key: dumped[key] for key in ("name", "seed", "model", "train", "optim")}
    return {"device": {**device, "threads": threads}, "versions": found, "config": settings}
