"""Steps on CUDA against JAX, judged as on the CPU: on the same GPU where JAX is allowed on it (JAX_PLATFORMS)."""

from __future__ import annotations

import pytest
import torch

from lockstep.core.config.schema import CompileConfig
from lockstep.core.parity.measures.calibrated_bounds import shipped
from lockstep.core.parity.modes.side_by_side import check_steps
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# TF32 has bounds once its clean runs are measured on a GPU (scripts/studies/calibrate.py).
TF32 = pytest.param("tf32", marks=pytest.mark.skipif("tf32/eager" not in shipped(), reason="TF32 has no bounds yet"))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "inductor"])
@pytest.mark.parametrize("policy", ["fp32", TF32, "bf16", "fp16", "fp8_tensorwise", "fp8_rowwise", "fp8_delayed"])
def test_two_steps_agree(policy, compiled):
    program = CompileConfig(enabled=compiled, backend="inductor")
    config = tiny_config(policy).model_copy(update={"device": "cuda", "compile": program})
    batches = [text_batch(config, step) for step in range(2)]
    for check in check_steps(TorchBackend(), JaxBackend(), config, iter(batches)):
        assert check.verdict == "agreed", [finding for finding in check.findings if not finding.ok]
