"""A device that was asked for and is not there is an error that names it."""

from __future__ import annotations

import pytest
import torch

from lockstep.core.errors import UserError
from lockstep.parity_tests.tiny import tiny_config
from lockstep.torch_backend.backend import TorchBackend


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def on(device):
    return tiny_config().model_copy(update={"device": device})


def test_cuda_in_vain(no_cuda):
    for ask in (TorchBackend().open, TorchBackend().describe):
        with pytest.raises(UserError, match="no CUDA device"):
            ask(on("cuda"))


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_cuda_the_cpu_is_taken_and_named(no_cuda, device):
    assert TorchBackend().open(on(device)).device.type == "cpu"
    assert TorchBackend().describe(on(device))["device_kind"] == "cpu"
