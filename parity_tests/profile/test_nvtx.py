"""The parts of a step have their names where a profiler needs them, and the step is the same."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession
from lockstep.torch_backend.tools import nvtx

STEP = ["step", *["micro-batch", "forward", "backward"] * 2, "clip", "clip", "optimizer"]


def named(said):
    """Return a way of naming that notes the names in `said`."""

    @contextmanager
    def trace(name):
        said.append(name)
        yield

    return trace


@pytest.mark.parametrize("compiled", [False, True])
def test_names_stand_around_the_step_and_change_no_bit(compiled, tmp_path):
    config = tiny_config(compiled=compiled)
    plain, traced = (TorchBackend().open(config) for _ in range(2))
    assert isinstance(plain, TorchSession) and isinstance(traced, TorchSession)
    said: list[str] = []
    traced.trace = named(said)
    for seed in range(2):
        assert plain.step(text_batch(config, seed)) == traced.step(text_batch(config, seed))
    assert said == STEP * 2
    said.clear()
    traced.write(tmp_path).wait()
    assert said == ["checkpoint"]
    # It is the program that the other session had compiled.
    assert traced.programs == 0
    ours, theirs = plain.state(), traced.state()
    assert all(np.array_equal(ours.params[name], theirs.params[name]) for name in ours.params)


def test_nvtx_is_asked_for_and_cuda_s(monkeypatch):
    config = tiny_config()
    asked = config.model_copy(update={"log": config.log.model_copy(update={"nvtx": True})})
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [nvtx.trace_of(c, d) for c in (config, asked) for d in (cpu, cuda)] == [
        nvtx.no_range,
        nvtx.no_range,
        nvtx.no_range,
        nvtx.nvtx,
    ]
    assert nvtx.in_force(config, cuda) == {} and "on the CPU" in nvtx.in_force(asked, cpu)["NVTX ranges"]
    assert TorchBackend().describe(asked)["in_force"]["NVTX ranges"]
    said: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range", named(said))
    with nvtx.nvtx("forward"):
        pass
    assert said == ["lockstep.forward"]
