"""A loop on CUDA under `watch`: transformers' families, single operations, one rank of FSDP2 and DDP over NCCL."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from lockstep.parity_tests.watch.processes import one_rank
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


@pytest.mark.parametrize("wrap", ["fully_shard", "plain"])
def test_one_rank_over_nccl(wrap: str) -> None:
    assert one_rank("cuda")[wrap]["headline"] == "agreed in 3 checks against your own module"
