"""Run one case of the rehearsal in a process of its own, above the stand-in, and write its results as JSON.

    python -m lockstep.scripts.studies.cuda_rehearsal.worker SETTINGS RESULT

SETTINGS: a JSON file of `Case.asked`. Started by `__main__.py` with the environment of build.py.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lockstep.core.backend import Batch
from lockstep.core.config.file import load_config
from lockstep.core.config.schema import RunConfig
from lockstep.scripts.studies.cuda_rehearsal.build import LIBRARY
from lockstep.scripts.studies.cuda_rehearsal.log import as_json, read_log
from lockstep.scripts.studies.repository import ROOT
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.ranks.process_groups import join_group, meet, take_device
from lockstep.torch_backend.session import TorchSession
from lockstep.torch_backend.tools.bench import random_batches

# The last step is logged: programs are compiled, and moments and gradients are allocated. DDP times its first ten steps
# with events, for which the host waits, and then every hundredth (torch/csrc/distributed/c10d/reducer.hpp,
# `should_collect_runtime_stats`).
STEPS, STEPS_OF_RANKS = 3, 12
# A key of the ranks' store.
DONE = "rehearsed"


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Run some steps of a configuration; return the results of the last one. Raises the trainer's exceptions."""
    config = load_config(ROOT / asked["run"], asked["settings"])
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "peak_bytes": [], "seconds": []}
    # Values have no effect here, and drawing a billion of them takes half a minute.
    TorchSession._initialise = lambda self: None  # type: ignore[method-assign]
    length = asked["length"] or config.train.sequence_length
    batch = batch_of(config, length)
    generated = Generated()
    backend = TorchBackend()
    backend.describe(config)  # raises for a configuration that cannot run, as a command does
    session = _opened(backend, config)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        last = (STEPS if config.train.ranks == 1 else STEPS_OF_RANKS) - 1
        for number in range(last + 1):
            torch.cuda.reset_peak_memory_stats()
            if number == last:
                ctypes.CDLL(LIBRARY).standin_log(str(log).encode())
                generated.launches.clear()
            before = sum(os.times()[:4])
            session.step(batch)
            # CPU time of this process and of its compilers, which other work on the machine does not change.
            found["seconds"].append(sum(os.times()[:4]) - before)
            found["peak_bytes"].append(torch.cuda.max_memory_allocated())
        ctypes.CDLL(LIBRARY).standin_log(b"")
        step = read_log(log.read_text().splitlines())
    counters = torch._dynamo.utils.counters
    made = generated.as_json()
    return (
        found
        | as_json(step)
        | {
            "launches": step.launches,
            "triton_launches": sum(step.triton.values()),
            "triton_gb": sum(kernel["gb"] * kernel["launches"] for kernel in made),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "graphs_compiled": counters["stats"]["unique_graphs"],
            "graph_breaks": sum(counters["graph_break"].values()),
            "generated": made,
        }
    )


def _opened(backend: TorchBackend, config: RunConfig) -> TorchSession:
    """Open the session of this process, as rank 0 if there are several."""
    if config.train.ranks > 1:
        rank, ranks, store = meet()
        join_group(rank, ranks, store, take_device(0, cuda=True))
    session = backend.open_rank(config)
    if config.train.ranks > 1:
        session.join_ranks()
    return session


def stand_by() -> None:
    """Act as another rank until rank 0 is done; that is enough, because collectives send nothing."""
    rank, ranks, store = meet()
    join_group(rank, ranks, store, take_device(0, cuda=True))
    # The session of rank 0 creates this group for its checkpoints.
    dist.new_group(backend="gloo")
    store.set_timeout(timedelta(hours=2))
    store.wait([DONE])


def batch_of(config: RunConfig, length: int) -> Batch:
    """Return a step's random tokens at this length, as many as at `train.sequence_length`, with documents if used."""
    train = config.train.model_copy(
        update={
            "batch_size": config.train.batch_size * config.train.sequence_length // length,
            "sequence_length": length,
        }
    )
    (batch,) = random_batches(config.model_copy(update={"train": train}), 1)
    if not config.attention.needs_documents:
        return batch
    documents = np.broadcast_to(np.arange(length, dtype=np.int32) // (length // 4), batch.tokens.shape).copy()
    return Batch(batch.tokens, batch.targets, batch.weights, documents)


class Generated:
    """A counter of launches of Inductor's kernels, with bytes read and written by each, as Inductor counts them."""

    def __init__(self) -> None:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        self.launches: Counter[tuple[str, float, int, int]] = Counter()
        original = CachingAutotuner.run

        def counted(kernel: Any, *arguments: Any, **options: Any) -> Any:
            meta = kernel.inductor_meta
            elements = 1
            for hint in (kernel.size_hints or {}).values():
                elements *= hint
            passes = max(1, kernel.fn.src.count("for r0_offset in "))
            self.launches[meta.get("kernel_name", "?"), meta.get("kernel_num_gb") or 0.0, elements, passes] += 1
            return original(kernel, *arguments, **options)

        CachingAutotuner.run = counted

    def as_json(self) -> list[dict[str, Any]]:
        """Return name, GB (10^9) per launch, elements rounded up to powers of two, passes and launches.

        Most bytes first.

        passes: loops over the reduced axis. Inductor counts a kernel's reads once for any number of loops.
        """
        found = [
            {"name": name, "gb": gb, "elements": elements, "passes": passes, "launches": launches}
            for (name, gb, elements, passes), launches in self.launches.items()
        ]
        return sorted(found, key=lambda one: -one["gb"] * one["launches"])


def main() -> None:
    """Run the first file's request and write the second file, also if the trainer refuses or fails."""
    if int(os.environ.get("RANK", "0")):
        stand_by()
        return
    asked, result = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    try:
        found = {"ran": True, **run(asked)}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = " ".join(str(error).split())
        found = {
            "ran": False,
            "error": f"{type(error).__name__}: {said[:600]}",
            "where": f"{Path(where.filename).name}:{where.lineno}",
            "torch": torch.__version__,
        }
        traceback.print_exc()
    result.write_text(json.dumps(found))
    if dist.is_initialized():
        dist.distributed_c10d._get_default_store().set(DONE, "")


if __name__ == "__main__":
    main()
