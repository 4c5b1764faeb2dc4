"""Narrow products that the CPU computes in FP32 and rounds once have the bits of torch's own narrow products.

Operands are small integers: each sum is exact in FP32 in every order, so that both ways round the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lockstep.core.components.cast_plan import LOCKSTEP, CastPlan
from lockstep.parity_tests.tiny import tiny_config
from lockstep.torch_backend import optim, precision
from lockstep.torch_backend.kernels.recompute import PRODUCTS
from lockstep.torch_backend.precision import POLICIES

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BIASED = replace(LOCKSTEP, bias="bf16")
NARROW_LOGITS = replace(LOCKSTEP, logits="bf16")


def integers(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=draw).float().requires_grad_()


def results(call: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return the output, and the gradient of each input for an output's gradient of integers."""
    made = call(*inputs)
    return [made, *torch.autograd.grad(made, inputs, integers(*made.shape, seed=9).detach().to(made.dtype))]


def linear(casts: CastPlan = LOCKSTEP) -> list[Tensor]:
    policy = replace(POLICIES["bf16"], casts=casts)
    return results(
        lambda x, weight, bias: precision.linear(x, weight, bias, policy),
        integers(2, 24, 64, seed=1), integers(48, 64, seed=2), integers(48, seed=3),
    )  # fmt: skip


def head(casts: CastPlan = LOCKSTEP) -> list[Tensor]:
    policy = replace(POLICIES["bf16"], casts=casts)
    return results(lambda x, w: precision.head(x, w, policy), integers(2, 24, 64, seed=1), integers(96, 64, seed=2))


def muon() -> list[Tensor]:
    left, right, total = (integers(32, 32, seed=seed).detach().bfloat16() for seed in range(3))
    return [optim._add_scaled_product(total, left, right, 2.0, 4.0)]


CASES = {
    "linear": linear,
    "linear, bias rounded with the product": lambda: linear(BIASED),
    "head": head,
    "head, logits rounded": lambda: head(NARROW_LOGITS),
    "Muon": muon,
}


@pytest.mark.parametrize("made", CASES.values(), ids=CASES.keys())
def test_the_bits_are_those_of_narrow_products(made: Callable[[], list[Tensor]], monkeypatch: pytest.MonkeyPatch):
    found = []
    for by_onednn in (True, False):
        monkeypatch.setattr(precision, "BF16_BY_ONEDNN", by_onednn)
        found.append(made())
    for own, by_fp32 in zip(*found, strict=True):
        assert own.dtype == by_fp32.dtype
        torch.testing.assert_close(own, by_fp32, rtol=0, atol=0)


def test_the_integers_are_rounded():
    """A sum of integers that bf16 holds exactly would show no rounding."""
    x, weight = integers(48, 64, seed=1).detach(), integers(48, 64, seed=2).detach()
    exact = x @ weight.T
    assert (exact.bfloat16().float() != exact).any()


@pytest.mark.parametrize("compiled", [False, True])
def test_backward_keeps_narrow_operands(compiled: bool, monkeypatch: pytest.MonkeyPatch):
    """FP32 copies live within a product: none is saved for the backward pass."""
    monkeypatch.setattr(precision, "BF16_BY_ONEDNN", False)
    x, weight = integers(24, 64, seed=1), integers(48, 64, seed=2)
    kept: list[torch.dtype] = []

    def call() -> Tensor:
        return precision.linear(x.bfloat16(), weight, None, POLICIES["bf16"]).sum()

    def keep(one: Tensor) -> Tensor:
        kept.append(one.dtype)
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        (torch.compile(call, backend="aot_eager") if compiled else call)()
    assert kept and set(kept) == {torch.bfloat16}


def test_checkpointing_keeps_them():
    assert torch.ops.lockstep.product_by_fp32.default in PRODUCTS


COPIES = {"bf16 products with FP32 results": "from FP32 copies of their operands"}


@pytest.mark.parametrize(
    ("policy", "by_onednn", "device", "told"),
    [
        ("bf16", False, CPU, {"bf16 products": "computed in FP32, then rounded", **COPIES}),
        ("bf16", True, CPU, COPIES),
        ("bf16", False, CUDA, {}),
        ("fp16", True, CPU, {"fp16 products": "computed in FP32, then rounded"}),
        ("fp8_tensorwise", False, CPU, {"bf16 products": "computed in FP32, then rounded", **COPIES}),
        ("fp32", False, CPU, {}),
        ("fp64", False, CPU, {}),
    ],
)
def test_the_table_at_start_tells(policy, by_onednn, device, told, monkeypatch):
    monkeypatch.setattr(precision, "BF16_BY_ONEDNN", by_onednn)
    assert precision.products_in_force(tiny_config(policy), device) == told


def test_without_fp32_logits_no_product_has_an_fp32_result(monkeypatch):
    monkeypatch.setattr(precision, "BF16_BY_ONEDNN", True)
    config = tiny_config("bf16")
    config = config.model_copy(update={"precision": config.precision.model_copy(update={"casts": "logits=bf16"})})
    assert precision.products_in_force(config, CPU) == {}
