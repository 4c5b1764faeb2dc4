"""A contender of `lockstep bench peers`, or rung of `bench ladder`, in a process of its own.

core/bench/turns.py defines the protocol.
"""

from __future__ import annotations

import importlib
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from lockstep.core.bench.loaders import Watched
from lockstep.core.config.schema import RunConfig
from lockstep.scripts.shared.in_lines import say, work_in_lines

# Modules that a contender needs besides its own: their memory does not count as its training's.
IMPORTS = {
    "lockstep.torch_backend.tools.peers.hugging_face": (
        "transformers.trainer",
        "transformers.models.llama.modeling_llama",
    ),
    "lockstep.torch_backend.tools.peers.torchtitan": ("torchtitan.trainer", "torchtitan.models.llama3"),
}


def resident(key: str = "VmRSS:") -> int | None:
    """Return this process's resident bytes, or with `VmHWM:` their peak; None if the system does not report them."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return None


def load(program: str) -> Any:
    """Import the contender's function, and everything that its first step would import."""
    import torch

    module, _, name = program.partition(":")
    for needed in IMPORTS.get(module, ()):
        importlib.import_module(needed)
    function = getattr(importlib.import_module(module), name)
    number = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([number])
    number.sum().backward()
    optimizer.step()
    importlib.import_module("torch._dynamo")
    return function


def watched(data: dict[str, str], config: RunConfig) -> Watched:
    """Open the data of a job (scripts/shared/bench_sides.py) with its loader."""
    module, _, name = data["loader"].partition(":")
    train = config.train
    opened = getattr(importlib.import_module(module), name)
    return Watched(opened(Path(data["folder"]), train.batch_size, train.sequence_length, 0, config.seed).make)


def compete(job: dict[str, Any], out: IO[str]) -> None:
    """Take part until `end`; every answer is a line of JSON."""
    import torch

    from lockstep.torch_backend.tools.bench import random_batches
    from lockstep.torch_backend.tools.peers.race import Over, Race

    torch.set_num_threads(job["threads"])
    run = load(job["program"])
    config = RunConfig.model_validate(job["config"])
    cuda = config.device == "cuda"
    batches = [] if job["data"] else random_batches(config)
    before = resident()
    made = watched(job["data"], config) if job["data"] else None
    race = Race(config, batches, made)
    with suppress(OSError):  # the peak is reset; if that is forbidden, the peak so far is that of the imports
        Path("/proc/self/clear_refs").write_text("5")
    started = 0.0

    def turn(loss: float | None) -> None:
        nonlocal started
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        found: dict[str, Any] = {"ready": True} if loss is None else {"seconds": seconds, "loss": loss}
        if made is not None and loss is not None:
            found |= {"data": made.seconds, "batch": made.digest()}
        say(found, out)
        if sys.stdin.readline().strip() != "go":
            raise Over
        started = time.perf_counter()

    with suppress(Over):
        run(race, turn)
    most = resident("VmHWM:")
    memory = None if most is None or before is None else most - before
    say({"memory": torch.cuda.max_memory_allocated() if cuda else memory}, out)


if __name__ == "__main__":
    work_in_lines(compete)
