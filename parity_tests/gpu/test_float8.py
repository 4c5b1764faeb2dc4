"""FP8 on tensor cores is what its emulation on the CPU is, within the accumulator's rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep.core.config.schema import PrecisionConfig
from lockstep.torch_backend.kernels.float8 import FIRST_CAPABILITY, float8

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FIRST_CAPABILITY
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_FP8, reason="needs a CUDA device with FP8")]
POLICIES = ["fp8_tensorwise", "fp8_rowwise"]


def distance(found: torch.Tensor, due: torch.Tensor) -> float:
    found, due = found.detach().double().cpu(), due.detach().double().cpu()
    return ((found - due).norm() / due.norm()).item()


@pytest.mark.parametrize("fast", [False, True], ids=["full", "fast"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_is_its_emulation(policy, fast):
    """Output and both gradients. The fast accumulator keeps about 14 bits."""
    precision = PrecisionConfig(policy=policy, fp8_fast_accumulation=fast)
    torch.manual_seed(0)
    x, weight, grad = torch.randn(128, 256).bfloat16(), torch.randn(64, 256) / 16, torch.randn(128, 64).bfloat16()

    def on(device):
        leaves = [tensor.to(device).requires_grad_() for tensor in (x, weight)]
        made = float8(precision, torch.device(device))
        assert made is not None
        out = made.product(*leaves)
        return [out, *torch.autograd.grad(out, leaves, grad.to(device))]

    for found, due in zip(on("cuda"), on("cpu"), strict=True):
        assert found.dtype == due.dtype and found.shape == due.shape
        assert distance(found, due) < (2**-6 if fast else 2**-8)


@pytest.mark.parametrize("share", [0.3, 1.0, 7.0])
def test_a_layer_with_delayed_scaling_is_its_emulation(share):
    """Scales that saturate, that fit, and that leave room; and the amaxes that it saw."""
    precision = PrecisionConfig(policy="fp8_delayed")
    torch.manual_seed(0)
    x, weight, grad = torch.randn(128, 256).bfloat16(), torch.randn(64, 256) / 16, torch.randn(128, 64).bfloat16()
    given = torch.stack([tensor.float().abs().max() for tensor in (x, weight, grad)])

    def on(device):
        made = float8(precision, torch.device(device))
        assert made is not None
        leaves = [tensor.to(device).requires_grad_() for tensor in (x, weight, share * given)]
        out = replace(made, amax=leaves[2]).product(*leaves[:2])
        return [out, *torch.autograd.grad(out, leaves, grad.to(device))]

    *found, seen = on("cuda")
    *due, _ = on("cpu")
    assert torch.equal(seen.cpu(), given)
    for one, other in zip(found, due, strict=True):
        assert distance(one, other) < 2**-6


@pytest.mark.parametrize("policy", POLICIES)
def test_the_layer_really_rounds_to_fp8(policy):
    """Three or two bits of mantissa: far from the product in bf16."""
    torch.manual_seed(0)
    x, weight = torch.randn(128, 256, device="cuda").bfloat16(), torch.randn(64, 256, device="cuda") / 16
    made = float8(PrecisionConfig(policy=policy), torch.device("cuda"))
    assert made is not None
    assert 0.005 < distance(made.product(x, weight), x.double() @ weight.double().T) < 0.1
