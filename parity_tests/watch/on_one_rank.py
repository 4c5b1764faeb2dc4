"""Watch loops under DistributedDataParallel on one rank. A program of its own, since it makes a process group.

Its argument is the device, `cpu` (gloo) or `cuda` (NCCL). It prints the headline, the verdict and the taps of the
first check of each case.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lockstep.parity_tests.watch.own import Gpt, train


def compiled(model: nn.Module) -> Any:
    """Return the model in DistributedDataParallel, compiled."""
    return torch.compile(DistributedDataParallel(model), backend="eager")


def main() -> None:
    """Train each case, and print its results as JSON."""
    device = sys.argv[1]
    group = {"cpu": "gloo", "cuda": "nccl"}[device]
    dist.init_process_group(group, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    watchers = {
        "plain": train(model=Gpt().to(device), wrap=DistributedDataParallel),
        "compiled": train(model=Gpt().to(device), wrap=compiled),
        "fully_shard": train(model=Gpt().to(device), wrap=fully_shard),
    }
    dist.destroy_process_group()
    found = {}
    for case, watcher in watchers.items():
        taps = [f.tap for f in watcher.checks[0].findings]
        found[case] = {"headline": watcher.headline, "verdict": watcher.verdict, "taps": taps}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
