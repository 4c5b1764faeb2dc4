"""CUDA computes with the requested arithmetic: TF32 or not, and the fused AdamW."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep.core.config.schema import CompileConfig
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession
from lockstep.torch_backend.tools.bench import device_facts, measure_floor, measure_steps, operands

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 3


def on_cuda(policy, compiled=False):
    program = CompileConfig(enabled=compiled, backend="inductor")
    return tiny_config(policy, hidden=256).model_copy(update={"device": "cuda", "compile": program})


def worst(found, due):
    return max(np.linalg.norm(found.grads[n] - g) / np.linalg.norm(g) for n, g in due.grads.items())


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="no TF32 before Ampere"
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "inductor"])
def test_tf32_is_in_force_under_its_policy_alone(compiled):
    """TF32 keeps 10 bits of mantissa, FP32 23; the switch is torch's own and must not stay for the next session."""
    batch = uneven_weights(text_batch(on_cuda("fp32")), 0)
    truth = TorchBackend().open(on_cuda("fp64")).gradients(batch)
    errors = [
        worst(TorchBackend().open(on_cuda(policy, compiled)).gradients(batch), truth)
        for policy in ("fp32", "tf32", "fp32")
    ]
    assert errors[0] < 1e-4 and errors[2] < 1e-4
    assert 1e-4 < errors[1] < 0.05


def test_fused_adamw_is_the_foreach_one():
    """Three updates by the same gradients; each rounds its operations a little differently."""
    config = on_cuda("fp32")
    foreach = config.model_copy(update={"optim": config.optim.model_copy(update={"fused": False})})
    sessions = TorchSession(config), TorchSession(foreach)
    assert [s.optimizer.param_groups[0]["fused"] for s in sessions] == [True, False]
    before = {name: p.detach().clone() for name, p in sessions[0].parameters.items()}
    for step in range(STEPS):
        for session in sessions:
            torch.manual_seed(step)
            for p in session.parameters.values():
                p.grad = torch.randn_like(p)
            session.optimizer.step()
    for name, start in before.items():
        fused, foreach = (s.parameters[name].detach().double() - start.double() for s in sessions)
        assert ((fused - foreach).norm() / foreach.norm()).item() < 1e-3, name
        for kind in ("exp_avg", "exp_avg_sq"):
            one, other = (s.optimizer.state[s.parameters[name]][kind] for s in sessions)
            # A step rounds a product, another one and their sum: half an ulp each of no more than the largest number.
            rounded = 3 * STEPS * 2.0**-24 * max(one.abs().max().item(), other.abs().max().item())
            torch.testing.assert_close(one, other, rtol=0, atol=2 * rounded)


def test_the_bench_measures_here():
    facts = device_facts()
    assert facts["kind"] == "cuda" and set(facts) > {"name", "driver", "power_limit_w"}
    assert facts["memory_bytes"] > 2**30
    floor = measure_floor(repeat=3)
    assert set(floor["rates"]) == set(operands("cuda")) and floor["bandwidth"] > 1e9
    found = measure_steps(on_cuda("bf16"), warmup=1, repeat=2)
    assert len(found["seconds"]) == 2 and found["in_force"]["optimizer"] == "AdamW (fused)"
    memory = found["memory"]
    assert 0 < memory["allocated"] < memory["peak_allocated"] <= memory["reserved"]
