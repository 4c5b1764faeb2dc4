"""Under `deterministic = true` steps on CUDA give the same bits twice, by every kernel, head and optimizer offered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from lockstep.core.config.schema import AttentionConfig
from lockstep.core.errors import UserError
from lockstep.parity_tests.gpu.repeated import PROGRAMS
from lockstep.parity_tests.repository import REPO
from lockstep.parity_tests.tiny import tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.tools.deterministic import CUBLAS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """By program; the process sets the environment itself."""
    environment = {key: value for key, value in os.environ.items() if key != CUBLAS}
    command = [sys.executable, "-m", "lockstep.parity_tests.gpu.repeated"]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=540)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_repeat_bit_for_bit(name: str, results: dict[str, dict[str, Any]]) -> None:
    if why := results[name].get("skipped"):
        pytest.skip(why)
    assert "wrong" not in results[name], results[name]["wrong"]


def test_cudnn_s_attention_is_refused_before_anything_starts() -> None:
    config = tiny_config("bf16", hidden=256).model_copy(
        update={"device": "cuda", "deterministic": True, "attention": AttentionConfig(kernel="cudnn")}
    )
    with pytest.raises(UserError, match="its backward pass is not deterministic"):
        TorchBackend().describe(config)
