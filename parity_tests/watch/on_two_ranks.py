"""Watch a loop under DistributedDataParallel on two gloo ranks. A program; its arguments are the rank and the port."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lockstep import watch
from lockstep.core.parity.watch.api import Watcher
from lockstep.parity_tests.watch.own import Gpt, batches, gpt_loss


def train(case: str, rank: int, store: str) -> Watcher:
    """Train a case. Each rank has its own batch; a check gets both."""
    dist.init_process_group("gloo", init_method=f"file://{store}-{case}", rank=rank, world_size=2)
    torch.manual_seed(0)
    own = Gpt()
    model: Any = DistributedDataParallel(own)
    if case == "compiled":
        model = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
    declared: Any = None if case == "one batch" else "mean"
    watcher = watch(model, optimizer, loss=gpt_loss, accumulate=declared, ranks="given", every=1)
    for pair in zip(batches(3, 0), batches(3, 1), strict=True):
        loss = gpt_loss(model, pair[rank])
        loss.backward()
        if case == "one rank's gradient doubled" and rank == 1:
            # As a hook on one rank alone may do. From this step on, the weights differ between ranks as well.
            for p in own.parameters():
                assert p.grad is not None
                p.grad *= 2
        total = loss.detach().clone()
        dist.all_reduce(total)
        with watcher.step(pair[rank] if case == "one batch" else list(pair), total / 2):
            optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    return watcher


if __name__ == "__main__":
    rank, store, *cases = sys.argv[1:]
    print(json.dumps({case: train(case, int(rank), store).headline for case in cases}))
