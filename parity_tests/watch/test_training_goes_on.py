"""Whatever goes wrong in the watcher, training goes on, and the verdict's line names what was not judged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import Tensor, nn

from lockstep.core.errors import UserError
from lockstep.core.parity.watch import checker, judge, listen, watcher
from lockstep.core.parity.watch.api import Watcher, watch
from lockstep.parity_tests.watch.stranger import FP32, Tagger, batches, torch_loss, train

# Where an error is planted → the link that is then not judged. In each, the others still are.
PLACES: dict[str, tuple[Any, str, str]] = {
    "reading the step": (watcher, "gradients_of", "step"),
    "listening to the optimizer": (watcher, "listen", "step"),
    "reading in the optimizer's step": (listen, "snapshot", "update"),
    "the reference": (checker.Checker, "_answers", "loss and gradients"),
    "judging gradients": (judge.Judge, "_gradient", "gradients"),
    "judging the loss": (judge, "loss_unit", "gradients"),
    "judging clipping": (checker, "clipping", "clip_coefficient"),
    "judging the update": (checker, "update", "update"),
    "judging hyperparameters": (checker, "hyperparameters", "hyperparameters"),
    "looking at all parameters": (checker, "outside", "update"),
    "the whole check": (checker.Checker, "_finish", "step"),
}


def breaks(*_: Any, **__: Any) -> Any:
    raise RuntimeError("planted")


def trained(**settings: Any) -> tuple[Watcher, list[Tensor]]:
    torch.manual_seed(5)
    model = Tagger()
    watcher = train(model, **settings)
    return watcher, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_the_watcher_ends_nothing(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, alone = trained(every=1000, start=1)
    owner, name, link = PLACES[place]
    monkeypatch.setattr(owner, name, breaks)
    with caplog.at_level(logging.DEBUG, "lockstep.watch"):
        watcher, weights = trained(on_alarm="stop")
    assert all(torch.equal(one, other) for one, other in zip(alone, weights, strict=True))
    assert len(watcher.checks) == 3
    text = f"{link}: not judged (RuntimeError: planted)"
    assert all(text in check.not_judged and text in check.not_covered for check in watcher.checks), watcher
    assert text in watcher.headline
    warned = [r for r in caplog.records if r.levelno == logging.WARNING and text in r.getMessage()]
    assert len(warned) == 1
    assert any(r.levelno == logging.DEBUG and r.exc_info for r in caplog.records)
    judged = {f.stage for check in watcher.checks for f in check.findings}
    if link == "step":
        assert watcher.verdict == "could_not" and not judged
    else:
        assert watcher.verdict == ("could_not" if "gradients" in link else "agreed")
        assert "update" in judged


def test_state_that_cannot_be_read_ends_nothing() -> None:
    """As torchao's 8-bit moments did, whose `.numpy()` raises inside `optimizer.step()`."""

    class Codes(Tensor):
        """A tensor whose values cannot be had."""

        @staticmethod
        def __new__(cls: Any, like: Tensor) -> Any:
            return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

        @classmethod
        def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
            raise NotImplementedError(func)

    class Coded(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["codes"] = Codes(p)
                    p.add_(p.grad, alpha=-1e-3)

    watcher = train(optimizer=Coded, rule="adamw")
    assert watcher.verdict == "agreed"
    assert all("update: not judged (NotImplementedError" in check.not_judged[0] for check in watcher.checks)
    assert "gradients" in {f.stage for f in watcher.checks[0].findings}


def test_an_optimizer_without_a_rule_stands_in_the_verdicts_line() -> None:
    watcher = train(optimizer=lambda p: torch.optim.NAdam(p, lr=1e-3))
    assert watcher.headline == "agreed in 3 checks; update: not judged (NAdam has no rule)"
    assert str(watcher).endswith(watcher.headline)
    assert watcher.to_json()["headline"] == watcher.headline
    assert watcher.to_json()["not_judged"] == ["update: not judged (NAdam has no rule)"]
    assert "agreed, 15 comparisons; update: not judged (NAdam has no rule); " in str(watcher)


def test_what_is_left_out_in_some_checks_is_counted() -> None:
    def sometimes(name: str, step: int) -> dict[str, Any]:
        return {"momentum": 0.9} if step == 2 else {}

    watcher = train(declared=sometimes)
    assert watcher.verdict == "agreed"
    assert watcher.headline.endswith("the optimizer of embed.weight), in 1 of 3 checks"), watcher.headline


def test_a_model_whose_parameters_change_is_not_judged() -> None:
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters())
    watcher = watch(model, optimizer, reference=FP32)
    model.more = nn.Linear(2, 2)
    (batch,) = batches(1)
    loss = torch_loss(model, batch)
    loss.backward()
    with watcher.step(batch, loss):
        optimizer.step()
    assert watcher.verdict == "could_not"
    assert "build the watcher after the model" in watcher.headline


@pytest.mark.parametrize("where", ["in the block", "in the closure"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, UserError])
def test_an_error_of_the_user_passes_through(error: type[BaseException], where: str) -> None:
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters())
    watcher = watch(model, optimizer, reference=FP32)
    (batch,) = batches(1)
    loss = torch_loss(model, batch)
    loss.backward()
    mine = error("mine")

    def fails() -> Any:
        raise mine

    with pytest.raises(error) as raised, watcher.step(batch, loss):
        optimizer.step(fails) if where == "in the closure" else fails()
    assert raised.value is mine
    assert watcher.checks == []
    assert not optimizer._optimizer_step_pre_hooks
    with watcher.step(batch, loss, check=True):
        optimizer.step()
    assert watcher.headline == "agreed in 1 checks"


def test_a_step_that_a_scaler_leaves_out_is_not_judged() -> None:
    """The first steps in FP16 look for a scale that fits; gradients are infinite, and the optimizer does not step."""
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=float("inf"))
    watcher = watch(model, optimizer, reference=FP32, every=1, on_alarm="stop")
    for batch in batches(4):
        loss = torch_loss(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        with watcher.step(batch, loss):
            scaler.step(optimizer)
        scaler.update(new_scale=1024.0)
        optimizer.zero_grad()
    first, *others = watcher.checks
    assert any(text.startswith("update: not judged (gradients are not finite") for text in first.not_judged)
    assert not any(f.stage in ("update", "step_count") and f.tap != "names" for f in first.findings if not f.ok)
    assert all(check.verdict == "agreed" and not check.not_judged for check in others), watcher


@pytest.mark.parametrize("inside", [True, False])
def test_a_scaler_that_unscales_inside_the_block_is_named(inside: bool) -> None:
    """Gradients are read as the block begins: they must be those that the loss has."""
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watcher = watch(model, optimizer, reference=FP32, clip_norm=1.0)
    (batch,) = batches(1)
    loss = torch_loss(model, batch)
    scaler.scale(loss).backward()
    if not inside:
        scaler.unscale_(optimizer)
    with watcher.step(batch, loss):
        if inside:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
    hint = "1024 times the right length, near 2^10: under a GradScaler call scaler.unscale_(optimizer) before the block"
    assert watcher.verdict == ("disagreed" if inside else "agreed"), watcher
    assert (hint in (watcher.checks[0].cause or "")) == inside


def test_a_step_left_out_with_finite_gradients_disagrees() -> None:
    """Planted: the exception above is for gradients that are not finite alone."""
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters())
    watcher = watch(model, optimizer, reference=FP32)
    (batch,) = batches(1)
    loss = torch_loss(model, batch)
    loss.backward()
    with watcher.step(batch, loss):
        pass
    assert watcher.verdict == "disagreed"


class Sharded:
    """A parameter as FSDP2 has it, whose parts do not come together."""

    def __init__(self, p: nn.Parameter) -> None:
        self._p = p

    def full_tensor(self) -> Any:
        raise RuntimeError("planted")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._p, name)


def test_sharded_parameters_that_cannot_be_read_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters())
    watcher = watch(model, optimizer, reference=FP32)
    named: Callable[..., Any] = model.named_parameters
    monkeypatch.setattr(model, "named_parameters", lambda: [(name, Sharded(p)) for name, p in named()])
    (batch,) = batches(1)
    loss = torch_loss(model, batch)
    loss.backward()
    with watcher.step(batch, loss):
        optimizer.step()
    assert watcher.headline == "could_not in 1 checks; step: not judged (RuntimeError: planted)"


class FullyShardedDataParallel(Tagger):
    """Goes by its name."""


def test_fsdp_is_told_of() -> None:
    watcher = train(FullyShardedDataParallel(), on_alarm="stop")
    why = "FullyShardedDataParallel cannot be watched: fully_shard (FSDP2) can"
    assert watcher.headline == f"could_not in 3 checks; step: not judged ({why})"


@pytest.mark.parametrize("wrapper", ["accelerate", "lightning"])
def test_an_optimizer_behind_a_wrapper_is_watched(wrapper: str) -> None:
    """Accelerate's own, and a class that passes `step` on as Lightning's does."""

    class Passes:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self.optimizer, name)

    def made(parameters: list[nn.Parameter]) -> Any:
        own = torch.optim.AdamW(parameters, lr=1e-3)
        if wrapper == "lightning":
            return Passes(own)
        return Accelerator(cpu=True).prepare(own)

    watcher = train(optimizer=made)
    assert watcher.headline == "agreed in 3 checks", watcher
    assert sum(f.stage == "update" and f.unequal is not None for f in watcher.checks[1].findings) == 8
