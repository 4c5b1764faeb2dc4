"""The coefficient of clipping by the bits of narrow gradients; torch's norm in bf16 is caught, one in FP32 is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.core.parity.watch.clipping import AS_NARROW
from lockstep.core.parity.watch.one_coefficient import coefficients
from lockstep.parity_tests.watch.own import train
from lockstep.parity_tests.watch.test_own_module import clip

NAMES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# torch's clip_grad_norm_ is off by no more than this with bf16 gradients.
LARGEST = AS_NARROW * 2.0**-7


def arrays(*tensors: torch.Tensor) -> dict[str, np.ndarray]:
    return {str(i): x.float().numpy() for i, x in enumerate(tensors)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("c", [1.0, 0.999, 0.73125, 0.5, 0.1000001, 1e-3])
def test_the_interval_holds_the_coefficient_and_is_far_sharper_than_a_unit(dtype: str, c: float) -> None:
    g = torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(NAMES[dtype])
    # As torch multiplies: in FP32, with a coefficient of FP32.
    for clipped in (g * torch.tensor(c), (g.float() * c).to(NAMES[dtype])):
        found = coefficients(arrays(g), arrays(clipped), {"0": dtype})
        assert found is not None and found[0] <= c <= found[1]
        # A power of two, or nearly, changes no digit of most numbers, or of any.
        assert found[1] / found[0] - 1 < (2.0**-10 if c in (0.73125, 0.1000001, 1e-3) else 2.0**-7)


def test_several_tensors_share_it() -> None:
    g = [torch.randn(64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2)]
    names = {"0": "bfloat16", "1": "bfloat16"}
    both = coefficients(arrays(*g), arrays(*(x * 0.7 for x in g)), names)
    assert both is not None and both[0] <= 0.7 <= both[1]
    assert coefficients(arrays(*g), arrays(g[0] * 0.7, g[1] * 0.71), names) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nothing_tells_where_nothing_can(dtype: str) -> None:
    g = torch.ones(4).to(NAMES[dtype])
    nothing = torch.zeros(4) if dtype == "bfloat16" else g
    assert coefficients(arrays(g), arrays(nothing), {"0": dtype}) is None
    assert coefficients(arrays(g.bfloat16()), arrays(-g.bfloat16()), {"0": "bfloat16"}) is None


def torchs(norm: float):
    return lambda model: nn.utils.clip_grad_norm_(model.parameters(), norm)


@pytest.mark.parametrize("seed", range(4))
def test_a_norm_in_bf16_is_caught_and_named(seed: int) -> None:
    watcher = train("gpt", "bf16 weights", 1, seed=seed, clip=torchs(0.5), clip_norm=0.5)
    (check,) = watcher.checks
    (found,) = (f for f in check.findings if f.stage == "clip_coefficient")
    error = found.measures[0]
    # A norm that happens to be a number of bf16 nearly would be right.
    assert error.name == "norm_error" and error.value < LARGEST
    assert (
        error.high is not None
        and found.ok == (error.value <= error.high)
        and (found.ok or "torch's clip_grad_norm_" in found.note)
    )
    assert not found.ok, "no seed here has such a norm"
    assert {f.stage for f in check.findings if not f.ok} == {"clip_coefficient"}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16 weights"])
def test_a_norm_in_fp32_is_not(precision: str, seed: int) -> None:
    watcher = train("gpt", precision, 2, seed=seed, clip=clip, clip_norm=0.5)
    assert watcher.verdict == "agreed", watcher
    if precision != "bf16 weights":
        assert train("gpt", precision, 1, seed=seed, clip=torchs(0.5), clip_norm=0.5).verdict == "agreed"


@pytest.mark.parametrize("off", [0.998, 1.002])
def test_two_in_a_thousand_are_seen_in_bf16(off: float) -> None:
    def longer(model: nn.Module) -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([g.float().norm() for g in grads]).norm()
        for g in grads:
            g.mul_(off * 0.5 / norm)

    watcher = train("gpt", "bf16 weights", 1, clip=longer, clip_norm=0.5)
    assert {f.stage for f in watcher.checks[0].findings if not f.ok} == {"clip_coefficient"}


def test_clipping_twice_and_forgotten_are_seen_in_bf16() -> None:
    def twice(model: nn.Module) -> None:
        clip(model)
        torchs(0.47)(model)

    for wrong in (twice, lambda _: None):
        watcher = train("gpt", "bf16 weights", 1, clip=wrong, clip_norm=0.5)
        assert "clip_coefficient" in {f.stage for f in watcher.checks[0].findings if not f.ok}
