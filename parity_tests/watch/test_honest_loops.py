"""Honest loops agree: every rule, every way of clipping, every precision; and what was judged is more than nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.core.parity.watch.api import Watcher
from lockstep.core.parity.watch.update_rules import to_bfloat16
from lockstep.parity_tests.watch.stranger import BF16, FP32, Tagger, batches, train


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def in_groups(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim == 2]},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


LOOPS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw, decay by group": {"optimizer": in_groups},
    "adamw, fused": {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)},
    "adamw, foreach": {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True)},
    "adam, coupled decay, amsgrad, maximize": {
        "optimizer": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True, maximize=True)
    },
    "sgd": {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)},
    "sgd, momentum, decay, dampening": {
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.1)
    },
    "sgd, nesterov": {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)},
    "clipped inside the block": {"clip": clip, "clip_norm": 0.1},
    "clipped before the block": {"spoil": lambda model, *_: clip(model), "clip_norm": 0.1},
    "clip that is never reached": {
        "clip": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0),
        "clip_norm": 100.0,
    },
    "bf16 autocast": {"autocast": True, "precision": "bf16", "reference": BF16},
}


@pytest.mark.parametrize("settings", LOOPS.values(), ids=LOOPS.keys())
def test_an_honest_loop_agrees(settings: dict[str, Any]) -> None:
    watcher = train(**settings)
    assert watcher.verdict == "agreed", watcher
    for check in watcher.checks:
        judged = {f.stage for f in check.findings}
        assert {"loss", "gradients", "update"} <= judged
        gradients = {f.tap for f in check.findings if f.stage == "gradients"}
        assert gradients == {"names", *(name for name, _ in Tagger().named_parameters())}
        of_updates = [{m.name for m in f.measures} for f in check.findings if f.stage == "update"]
        assert sum({"excess", "gain_difference", "twin_distance"} <= names for names in of_updates) == 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_weights_of_other_dtypes_agree(dtype: torch.dtype) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch[0]).flatten(0, 1)
        return nn.functional.cross_entropy(logits.float() if dtype is torch.bfloat16 else logits, batch[1].flatten())

    watcher = train(Tagger().to(dtype), loss=loss, reference=BF16 if dtype is torch.bfloat16 else FP32)
    assert watcher.verdict == "agreed", watcher
    assert any(f.stage == "update" and f.unequal is not None for f in watcher.checks[0].findings)


def test_updates_that_bf16_weights_swallow_are_told() -> None:
    watcher = train(Tagger().bfloat16(), lambda p: torch.optim.SGD(p, lr=1e-6), reference=BF16)
    notes = [f.note for f in watcher.checks[0].findings if f.stage == "update" and f.note]
    assert any("vanishes" in note for note in notes)


def test_rounding_to_bfloat16_is_torchs() -> None:
    x = np.random.default_rng(0).standard_normal(10_000) * 2.0 ** np.random.default_rng(1).integers(-40, 40, 10_000)
    ties = 1 + np.arange(64) / 256
    x = np.concatenate([x, ties, -ties, [0.0, -0.0, np.inf, -np.inf]])
    expected = torch.from_numpy(x).float().bfloat16().double().numpy()
    np.testing.assert_array_equal(to_bfloat16(x), expected)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return [
        *(p.detach() for p in model.parameters()),
        *(p.grad for p in model.parameters() if p.grad is not None),
        *state,
    ]


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD], ids=["adamw", "sgd"])
def test_watching_changes_nothing(make: Callable[..., torch.optim.Optimizer]) -> None:
    """Weights, gradients, optimizer state and random numbers after five watched steps are those without a check."""
    ends = []
    for every in (1, 1000):
        kept: list[torch.optim.Optimizer] = []

        def optimizer(parameters: list[nn.Parameter], kept: list[Any] = kept) -> torch.optim.Optimizer:
            kept.append(make(parameters, lr=1e-2))
            return kept[0]

        torch.manual_seed(3)
        model = Tagger(dropout=0.1)
        watcher = train(model, optimizer, every=every, zero_grad=False, start=0 if every == 1 else 1)
        assert len(watcher.checks) == (3 if every == 1 else 1)
        assert not kept[0]._optimizer_step_pre_hooks
        assert not kept[0]._optimizer_step_post_hooks
        ends.append(
            [
                *everything(model, kept[0]),
                torch.get_rng_state(),
                torch.from_numpy(np.random.get_state()[1].copy()),  # type: ignore[index]
            ]
        )
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


def test_only_due_steps_are_checked() -> None:
    watcher: Watcher = train(data=batches(7), every=3)
    assert [check.step for check in watcher.checks] == [1, 3, 6]
    assert watcher.verdict == "agreed"
