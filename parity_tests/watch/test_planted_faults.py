"""Faults planted in somebody's loop: each is seen in the first step in which it acts, and where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.core.parity.watch.api import Disagreed
from lockstep.parity_tests.watch.stranger import BF16, WIDTH, Batch, Tagger, batches, torch_loss, train

NAMES = [name for name, _ in Tagger().named_parameters()]


def scaled(name: str, by: float) -> Callable[..., None]:
    def spoil(model: nn.Module, *_: Any) -> None:
        grad = dict(model.named_parameters())[name].grad
        assert grad is not None
        grad.mul_(by)

    return spoil


@pytest.mark.parametrize("name", NAMES)
def test_one_gradient_half_as_long_again(name: str) -> None:
    watcher = train(spoil=scaled(name, 1.5), data=batches(1))
    (check,) = watcher.checks
    assert check.verdict == "disagreed"
    assert [f.tap for f in check.findings if not f.ok] == [name]
    assert check.origin is not None
    assert (check.origin.stage, check.origin.phase) == ("gradients", "backward")
    assert check.cause == f"the gradient of {name}: right direction, 1.5 times the right length"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("matrix", "vector", "settings"),
    [(1e-5, 1e-4, {}), (0.06, 0.5, {"reference": BF16, "precision": "bf16", "autocast": True})],
    ids=["fp32", "bf16"],
)
def test_the_smallest_scale_that_is_promised(name: str, matrix: float, vector: float, settings: dict[str, Any]) -> None:
    """docs/guide/watch.md: what a scale of one gradient must be to be seen, of matrices and of vectors of 32 to 61."""
    effect = matrix if dict(Tagger().named_parameters())[name].ndim == 2 else vector
    assert train(spoil=scaled(name, 1 + effect), data=batches(1), **settings).verdict == "disagreed"


class Detached(Tagger):
    def attended(self, x: Tensor) -> Tensor:
        return x + super().attended(x).detach() - x.detach()


class Unscaled(Tagger):
    def attended(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.18)


class SlightlyOtherNorm(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.norm.eps = 5e-5


class Bf16Logits(Tagger):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).bfloat16().float()


def summed_over_rows(model: nn.Module, batch: Batch) -> Tensor:
    return torch_loss(model, batch) * len(batch[0])


def mean_of_uneven_parts(model: nn.Module, batch: Batch) -> Tensor:
    parts = [(batch[0][:4], batch[1][:4]), (batch[0][4:], batch[1][4:])]
    return torch.stack([torch_loss(model, part) for part in parts]).mean()


def reported_twice(model: nn.Module, batch: Batch) -> Tensor:
    value = torch_loss(model, batch)
    return value + 1e-3 * value.detach()


def forget(_: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    if number == 2:
        optimizer.state.clear()


class NoBiasCorrection(torch.optim.AdamW):
    """A rewrite of AdamW that counts from the second step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, entry in ((p, self.state[p]) for group in self.param_groups for p in group["params"]):
            if not entry:
                entry |= {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        super().step()
        for entry in self.state.values():
            entry["step"] -= 1 if entry["step"] == 2 else 0


class DecaysGradient(torch.optim.AdamW):
    """Decay through the moments, as Adam has it, under the name of AdamW."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(p, alpha=group["weight_decay"])
            decay, group["weight_decay"] = group["weight_decay"], 0.0
            torch.optim.AdamW.step(self)
            group["weight_decay"] = decay


def adamw(**settings: Any) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **settings)


DECLARED = {"betas": (0.9, 0.999), "eps": 1e-8}

# name → (settings of the loop, first bad step, stage, tap, phase). A fault of the forward that hides in the mean shows
# in the gradients, nearest to the loss
# first; None: which tensor that is hangs on the bounds.
FAULTS: dict[str, tuple[dict[str, Any], int, str, str | None, str]] = {
    "zero_grad forgotten": ({"zero_grad": False}, 2, "gradients", "down.bias", "backward"),
    "detach in the forward": ({"model": Detached}, 1, "gradients", "qkv.weight", "backward"),
    "attention scale 0.18 for 0.1768": ({"model": Unscaled}, 1, "gradients", "down.bias", "backward"),
    # Just at the loss's bound: in which of the two it shows first hangs on the order of FP32 sums.
    "logits rounded to bf16": ({"model": Bf16Logits}, 1, "loss|gradients", None, "forward|backward"),
    "norm eps 5e-5 for 1e-5": ({"model": SlightlyOtherNorm}, 1, "gradients", None, "backward"),
    "dropout left on": ({"model": lambda: Tagger(dropout=0.1)}, 1, "loss", "loss", "forward"),
    "loss summed over rows": ({"loss": summed_over_rows}, 1, "loss", "loss", "forward"),
    "mean of uneven means": ({"loss": mean_of_uneven_parts}, 1, "loss", "loss", "forward"),
    "reported loss off by 1e-3": ({"loss": reported_twice}, 1, "loss", "loss", "forward"),
    "moments lost between steps": ({"spoil": forget}, 3, "moments", "state", "state"),
    "bias correction a step late": ({"optimizer": lambda p: NoBiasCorrection(p, lr=1e-3), "rule": "adamw"}, 1,
                                    "update", "embed.weight", "update"),
    "coupled decay called AdamW": ({"optimizer": lambda p: DecaysGradient(p, lr=1e-3, weight_decay=0.1),
                                    "rule": "adamw"}, 1, "moments", "exp_avg/embed.weight", "update"),
    "betas other than declared": ({"optimizer": adamw(betas=(0.9, 0.95)), "declared": DECLARED}, 1, "update",
                                  "hyperparameters", "update"),
    "eps other than declared": ({"optimizer": adamw(eps=1e-6), "declared": DECLARED}, 1, "update", "hyperparameters",
                                "update"),
    "decay on norms": ({"declared": lambda name, step: {"weight_decay": 0.0 if "norm" in name else 0.01}}, 1, "update",
                       "hyperparameters", "update"),
    "learning rate not the schedule's": ({"declared": lambda name, step: {"lr": 1e-3 if step < 2 else 5e-4}}, 2,
                                         "learning_rate", "hyperparameters", "update"),
    "clipping that was not declared": ({"clip": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1)}, 1,
                                       "clip_coefficient", "gradients", "update"),
    "clipping forgotten": ({"clip_norm": 0.1}, 1, "clip_coefficient", "clip_coefficient", "update"),
    "clipped each by itself": ({"clip": lambda m: [nn.utils.clip_grad_norm_(p, 0.1) for p in m.parameters()],
                                "clip_norm": 0.1}, 1, "clip_coefficient", "clip_coefficient", "update"),
    "optimizer of another copy": ({"optimizer": lambda p: torch.optim.AdamW(Tagger().parameters())}, 1, "update",
                                  "names", "update"),
    "a layer not in the optimizer": ({"optimizer": lambda p: torch.optim.AdamW(p[:-1])}, 1, "update", "names",
                                     "update"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_seen_where_it_is(name: str) -> None:
    settings, first, stage, tap, phase = FAULTS[name]
    model = settings["model"]() if "model" in settings else None
    watcher = train(**{**settings, "model": model})
    bad = next((check for check in watcher.checks if check.verdict == "disagreed"), None)
    assert bad is not None, watcher
    assert bad.origin is not None
    assert bad.step == first, watcher
    assert bad.origin.stage in stage.split("|") and bad.origin.phase in phase.split("|"), watcher
    assert tap in (None, bad.origin.tap)


def test_a_gradient_that_is_not_a_number_is_no_fault_of_the_update() -> None:
    (check,) = train(spoil=scaled("up.weight", float("nan")), data=batches(1)).checks
    assert check.origin is not None
    assert (check.origin.stage, check.origin.tap) == ("gradients", "up.weight")
    assert "update of up.weight: its gradient is not finite" in check.not_covered


def test_autocast_that_was_not_declared_is_guessed() -> None:
    (check,) = train(autocast=True, data=batches(1)).checks
    assert check.verdict == "disagreed"
    assert check.cause is not None
    assert "is autocast on" in check.cause


class _OtherEpsilon(Tagger):
    """An epsilon that moves every gradient by about as much as bf16 does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=3e-2)


def test_an_epsilon_is_not_taken_for_autocast() -> None:
    (check,) = train(_OtherEpsilon(), data=batches(1)).checks
    assert check.verdict == "disagreed"
    assert check.cause is None


def test_a_length_that_scatters_is_named_by_its_median() -> None:
    """Each tensor has another factor, and none has the right direction."""

    def spoil(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        generator = torch.Generator().manual_seed(0)
        for position, p in enumerate(model.parameters()):
            assert p.grad is not None
            noise = torch.randn(p.shape, generator=generator) * p.grad.norm() / p.numel() ** 0.5
            p.grad.mul_(4 + 0.05 * (position - 3)).add_(noise, alpha=0.4)

    (check,) = train(spoil=spoil, data=batches(1)).checks
    assert check.cause is not None and "times the right length in the median" in check.cause
    assert 3.8 < float(check.cause.split(": ")[1].split(" times")[0]) < 4.3


def test_what_hyperparameters_hide_is_said() -> None:
    """Without `declared`, an optimizer that does what its own groups say is right, whatever they say."""
    watcher = train(optimizer=adamw(eps=1e-3, betas=(0.5, 0.5)))
    assert watcher.verdict == "agreed"
    assert any(item.startswith("hyperparameters: read from the optimizer") for item in watcher.checks[0].not_covered)


def test_stop_raises_after_the_step() -> None:
    with pytest.raises(Disagreed, match=r"up\.bias"):
        train(spoil=scaled("up.bias", 1.5), on_alarm="stop")


def test_an_alarm_calls_the_function() -> None:
    alarms: list[int] = []
    train(spoil=scaled("up.bias", 1.5), on_alarm=lambda check: alarms.append(check.step))
    assert alarms == [1, 2, 3]
