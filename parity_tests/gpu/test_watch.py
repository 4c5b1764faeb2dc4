"""A loop on CUDA under `watch`: transformers' families, single operations, one rank of FSDP2 and DDP over NCCL."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lockstep.parity_tests.fused_on_cuda import in_fp32
from lockstep.parity_tests.watch.processes import one_rank
from lockstep.parity_tests.watch.stepped import stepped
from lockstep.parity_tests.watch.test_from_hf import MODELS, model_of, train
from lockstep.scripts.studies import operations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_clean_family_agrees(name: str, precision: str) -> None:
    watcher = train(model_of(name).cuda(), precision)
    assert watcher.headline == "agreed in 2 checks", watcher


@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_that_is_too_long_is_named(name: str) -> None:
    model = model_of(name).cuda()
    ends = "up_proj.weight", "c_fc.weight"
    matrix, parameter = next((name, p) for name, p in model.named_parameters() if name.endswith(ends))
    parameter.register_hook(lambda gradient: gradient * 1.05)
    watcher = train(model, on_alarm=lambda check: None)
    wrong = [f.tap for f in watcher.checks[0].findings if not f.ok and f.stage == "gradients"]
    assert wrong == [matrix], watcher


@pytest.mark.parametrize("trains", operations.TRAINS)
@pytest.mark.parametrize("name", operations.MODELS)
def test_operations_of_a_clean_step_agree(name: str, trains: str) -> None:
    torch.manual_seed(1)
    watcher = operations.watched(operations.MODELS[name](), trains, operations.batches(2), True, nullcontext(), "cuda")
    assert watcher.verdict == "agreed", watcher


def test_a_wrong_kernel_is_named() -> None:
    model, wrong, _ = operations.planted("GELU by tanh", "cuda")
    check = operations.watched(model, "fp32", operations.batches(1), True, wrong, "cuda").checks[0]
    assert check.origin is not None and check.origin.stage == "aten.gelu"


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_the_stand_in_for_the_fused_kernel_has_its_bits(beta2: float, amsgrad: bool) -> None:
    """Moments and weights of AdamW. Adam's, with decay in the gradient, differ in the last bit of some weights."""
    for number in (1, 2, 3, 10, 100, 1000):
        torch.manual_seed(number)
        p, g, m, v, largest = (torch.randn(4096) * size for size in (1.0, 1e-3, 1e-3, 1e-6, 1e-6))
        state = [p, g, m, v.abs(), largest.abs()]
        sides = [[[x.clone().to(device)] for x in state] for device in ("cpu", "cuda")]
        kernels: list[Callable[..., Any]] = [in_fp32(decoupled=True), torch._fused_adamw_]
        for kernel, device, (weights, grads, first, second, over) in zip(kernels, ("cpu", "cuda"), sides, strict=True):
            kernel(
                weights, grads, first, second, over if amsgrad else [], [torch.tensor(float(number), device=device)],
                lr=1e-3, beta1=0.9, beta2=beta2, weight_decay=0.1, eps=1e-8, amsgrad=amsgrad, maximize=False,
            )  # fmt: skip
        for ours, theirs in zip(*sides, strict=True):
            assert torch.equal(ours[0], theirs[0].cpu()), number


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_fused_optimizers_agree(kind: type[torch.optim.Optimizer]) -> None:
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}
    settings |= {"momentum": 0.9} if kind is torch.optim.SGD else {}
    watcher = stepped(lambda p: kind(p, **settings), device="cuda")
    assert watcher.headline == "agreed in 4 checks", watcher
    if kind is not torch.optim.Adam:
        compared = [f for check in watcher.checks for f in check.findings if f.stage in ("update", "moments")]
        assert max(f.unequal or 0.0 for f in compared) < 1e-3


@pytest.mark.parametrize("wrap", ["fully_shard", "plain"])
def test_one_rank_over_nccl(wrap: str) -> None:
    assert one_rank("cuda")[wrap]["headline"] == "agreed in 3 checks against your own module"
