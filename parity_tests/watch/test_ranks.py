"""DistributedDataParallel over gloo: the truth is the mean over all ranks' batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.parity_tests.repository import REPO
from lockstep.parity_tests.watch.own import train
from lockstep.torch_backend.watch import own_module


@pytest.fixture
def alone() -> Iterator[None]:
    if dist.is_initialized():  # by a test before it in this process
        assert dist.get_world_size() == 1
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, True])
def test_one_rank(compiled: bool, alone: None) -> None:
    """Its wrapper is taken off, and that of a compiler around it."""

    def wrapped(model: nn.Module) -> Any:
        ddp = DistributedDataParallel(model)
        return torch.compile(ddp, backend="eager") if compiled else ddp

    watcher = train(wrap=wrapped)
    assert watcher.headline == "agreed in 3 checks against your own module", watcher
    assert "embed.weight" in {f.tap for f in watcher.checks[0].findings}


def test_a_batch_of_one_rank_of_two_is_not_judged(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_module, "ranks_of", lambda _: 2)
    watcher = train(wrap=DistributedDataParallel, on_alarm="stop")
    assert watcher.verdict == "could_not" and "gradients are the mean of 2 ranks'" in watcher.headline


CASES = ("clean", "compiled", "one batch", "one rank's gradient doubled")


def test_two_ranks(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    module = "lockstep.parity_tests.watch.on_two_ranks"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(tmp_path / "store"), *CASES],
            cwd=REPO,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=120) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), told
    for out, _ in told:
        said = json.loads(out.splitlines()[-1])
        assert said["clean"] == said["compiled"] == "agreed in 3 checks against your own module", said
        assert said["one batch"].startswith("could_not in 3 checks")
        assert "gradients are the mean of 2 ranks'" in said["one batch"]
        assert said["one rank's gradient doubled"].startswith("disagreed"), said
