"""`optimizer.step(closure)` with forward and backward inside the closure, as Lightning's automatic optimisation has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.core.parity.watch.api import Watcher, watch
from lockstep.parity_tests.watch.stranger import FP32, Batch, Tagger, batches, torch_loss

CLIP = 0.1


class Automatic:
    """Lightning's order: zero_grad, forward, backward and clipping in a closure that the optimizer calls.

    lightning/pytorch/loops/optimization/automatic.py and plugins/precision/precision.py, `_wrap_closure`.
    """

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = Tagger()
        self.optimizer = optimizer(self.model.parameters(), lr=1e-2)
        self.watcher: Watcher = watch(self.model, self.optimizer, reference=FP32, every=1, **settings)

    def loss(self, batch: Batch) -> Tensor:
        return torch_loss(self.model, batch)

    def after_backward(self) -> None:
        """Clip, where that is asked for."""

    def closure(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.after_backward()
        return loss.detach()

    def fit(self, steps: int = 3) -> Watcher:
        for batch in batches(steps):
            with self.watcher.step(batch):
                self.optimizer.step(partial(self.closure, batch))  # type: ignore[arg-type]
        return self.watcher


class Clipped(Automatic):
    def after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)


class Scaled(Automatic):
    def closure(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        (1.01 * loss).backward()
        return loss.detach()


class ClippedTwice(Automatic):
    def after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP / 2)


class Accumulates(Automatic):
    """`zero_grad` forgotten: what the closure of the step before left is still there."""

    def closure(self, batch: Batch) -> Tensor:
        loss = self.loss(batch)
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD], ids=["adamw", "sgd"])
def test_a_clean_run_agrees(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    watcher = Automatic(optimizer).fit()
    assert watcher.headline == "agreed in 3 checks", watcher
    for check in watcher.checks:
        assert {"loss", "gradients", "update", "clip_coefficient"} <= {f.stage for f in check.findings}


def test_a_clean_run_that_clips_agrees() -> None:
    assert Clipped(clip_norm=CLIP).fit().headline == "agreed in 3 checks"


@pytest.mark.parametrize(
    ("loop", "settings", "step", "stage"),
    [
        (Scaled, {}, 1, "gradients"),
        (Automatic, {"clip_norm": CLIP}, 1, "clip_coefficient"),
        (ClippedTwice, {"clip_norm": CLIP}, 1, "gradients"),
        (Accumulates, {}, 2, "gradients"),
    ],
    ids=["loss scaled by 1.01 in backward", "clipping forgotten", "clipped twice", "zero_grad forgotten"],
)
def test_a_fault_in_the_closure_is_caught(loop: Any, settings: dict[str, Any], step: int, stage: str) -> None:
    watcher = loop(**settings).fit()
    bad = next(check for check in watcher.checks if check.verdict == "disagreed")
    assert bad.step == step, watcher
    assert stage in {f.stage for f in bad.findings if not f.ok}, watcher


def test_the_closures_loss_is_compared() -> None:
    class Wrong(Automatic):
        def closure(self, batch: Batch) -> Tensor:
            return super().closure(batch) + 1e-3

    watcher = Wrong().fit(1)
    assert [f.tap for f in watcher.checks[0].findings if not f.ok] == ["loss"]


class ReadsEarly(Automatic):
    """Lightning's `on_before_optimizer_step` stands between the closure's backward and its clipping."""

    times = 1.0
    read = True

    def closure(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        (self.times * loss).backward()
        if self.read:
            self.watcher.in_closure(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        return loss.detach() + 1  # not the loss of the step


def test_gradients_that_are_read_before_the_closure_clips() -> None:
    assert ReadsEarly(clip_norm=CLIP).fit().headline == "agreed in 3 checks"
    unchecked = ReadsEarly(clip_norm=CLIP)
    unchecked.watcher.in_closure(1.0)  # outside of a step there is nothing to read
    assert unchecked.watcher.checks == []


@pytest.mark.parametrize(("read", "seen"), [(True, True), (False, False)])
def test_a_common_factor_is_seen_before_the_closure_clips_alone(read: bool, seen: bool) -> None:
    class Doubled(ReadsEarly):
        times = 2.0

    Doubled.read = read
    check = Doubled(clip_norm=CLIP).fit(1).checks[0]
    assert any(f.stage == "gradients" and not f.ok for f in check.findings) == seen
    assert ("2 times the right length" in (check.cause or "")) == seen


def test_a_closure_by_name_and_one_that_is_called_again() -> None:
    """LBFGS calls its closure many times: the first call is at the weights that the step started from."""
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-2, max_iter=4)
    watcher = watch(model, optimizer, reference=FP32, every=1)
    calls = 0
    for batch in batches(2):

        def closure(batch: Batch = batch) -> Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = torch_loss(model, batch)
            loss.backward()
            return loss

        with watcher.step(batch):
            optimizer.step(closure=closure)
    assert calls > 4
    assert watcher.headline == "agreed in 2 checks; update: not judged (LBFGS has no rule)", watcher


def test_a_closure_that_is_never_called_is_told() -> None:
    class Deaf(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()

    watcher = Automatic(Deaf, rule="adamw").fit(1)
    assert "update: not judged (optimizer.step(closure) did not call its closure)" in watcher.headline


def test_gradients_at_weights_that_another_optimizer_moved_are_not_judged() -> None:
    torch.manual_seed(0)
    model = Tagger()
    parts = list(model.parameters())
    both = [torch.optim.SGD(parts[:1], lr=0.1), torch.optim.AdamW(parts[1:])]
    watcher = watch(model, both, reference=FP32, every=1)
    for batch in batches(2):

        def closure(batch: Batch = batch) -> Tensor:
            model.zero_grad()
            loss = torch_loss(model, batch)
            loss.backward()
            return loss

        with watcher.step(batch):
            for optimizer in both:
                optimizer.step(closure)  # type: ignore[arg-type]
    assert watcher.verdict == "agreed", watcher
    for check in watcher.checks:
        assert {f.tap for f in check.findings if f.stage == "gradients"} == {"names", "embed.weight"}
        assert any("another optimizer had changed the weights" in text for text in check.not_judged)
        assert sum(f.stage == "update" and f.unequal is not None for f in check.findings) == 8
