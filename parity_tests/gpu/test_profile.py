"""A step on a GPU is recorded with its kernels, its CUDA graphs, and what the device waits for."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from lockstep.core.profile.summary import summarize
from lockstep.core.profile.trace import read_trace
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession
from lockstep.torch_backend.tools.profile import record, under_nsight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_kernels_are_recorded(mode: str, tmp_path: Path) -> None:
    config = tiny_config()
    compile = config.compile.model_copy(update={"enabled": True, "backend": "inductor", "mode": mode})
    config = config.model_copy(update={"compile": compile})
    session = TorchBackend().open(config)
    assert isinstance(session, TorchSession)
    batches = itertools.repeat(text_batch(config))
    measured = record(session, session, batches, tmp_path / "trace.json.gz")
    found = summarize(read_trace(tmp_path / "trace.json.gz"))
    gpu = found["gpu"]
    assert found["device"] == "cuda" and measured["memory"]["peak_allocated"] > 0
    assert 0 < gpu["busy_seconds"] < found["profiled_seconds"] * 1.01 and gpu["launches"] > 10
    assert (gpu["graph_share"] > 0.1) == (mode == "reduce-overhead")
    # A kernel is known by the call that asked for it.
    assert {row["part"] for row in found["top"]} >= {"forward", "backward"}


def test_the_steps_for_nsight_systems_run() -> None:
    session = TorchBackend().open(tiny_config())
    assert isinstance(session, TorchSession)
    assert under_nsight(session, session, itertools.repeat(text_batch(tiny_config()))) > 0
