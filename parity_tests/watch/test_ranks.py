"""DistributedDataParallel over gloo: the truth is the mean over all ranks' batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.parity_tests.watch.own import train
from lockstep.parity_tests.watch.processes import answers, one_rank
from lockstep.torch_backend.watch import own_module


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Run parity_tests/watch/on_one_rank.py, and return by case what it prints."""
    return one_rank("cpu")


@pytest.mark.parametrize("case", ["plain", "compiled", "fully_shard"])
def test_one_rank(case: str, alone: dict[str, Any]) -> None:
    """Its wrapper is taken off, and that of a compiler around it, and what FSDP2 adds to the module."""
    assert alone[case]["headline"] == "agreed in 3 checks against your own module"
    assert "embed.weight" in alone[case]["taps"]


def test_a_batch_of_one_rank_of_two_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_module, "ranks_of", lambda model: 2)
    watcher = train(on_alarm="stop")
    assert watcher.verdict == "could_not" and "gradients are the mean of 2 ranks'" in watcher.headline


CASES = ("clean", "compiled", "one batch", "one rank's gradient doubled")


def test_two_ranks(tmp_path: Path) -> None:
    for said in answers("on_two_ranks", str(tmp_path / "store"), *CASES):
        assert said["clean"] == said["compiled"] == "agreed in 3 checks against your own module", said
        assert said["one batch"].startswith("could_not in 3 checks")
        assert "gradients are the mean of 2 ranks'" in said["one batch"]
        assert said["one rank's gradient doubled"].startswith("disagreed"), said
