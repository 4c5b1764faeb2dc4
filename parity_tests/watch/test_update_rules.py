"""Every rule agrees with the library's own optimizer over several steps, and with none that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.core.parity.watch.library_rules import rule_of
from lockstep.parity_tests.fused_on_cuda import fused_on_cuda
from lockstep.parity_tests.watch.stepped import STEPS, Made, stepped
from lockstep.torch_backend.tools.import_logging import quiet_import

with quiet_import():
    import bitsandbytes.optim
    import torchao.optim

bnb: Any = bitsandbytes.optim
ao: Any = torchao.optim


def of(kind: Any, **settings: Any) -> Made:
    return lambda parameters: kind(parameters, **settings)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "sgd, momentum, dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "sgd, nesterov, maximize": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True, "weight_decay": 0.1},
    ),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw, amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "adamw, fused": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
    "adamw, foreach": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}),
    "muon": (torch.optim.Muon, {"lr": 1e-2, "weight_decay": 0.1}),
    "muon, no nesterov, other length": (
        torch.optim.Muon,
        {"lr": 1e-2, "weight_decay": 0.1, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    ),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1}),
    "adafactor, foreach": (torch.optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}),
    "torchao adamw": (ao.AdamW8bit, {"lr": 1e-2, "weight_decay": 0.1}),
    "torchao adam": (ao.Adam8bit, {"lr": 1e-2, "weight_decay": 0.1}),
    "torchao adamw, blocks of 128": (ao.AdamW8bit, {"lr": 1e-2, "weight_decay": 0.1, "block_size": 128}),
    "bitsandbytes 8-bit": (bnb.AdamW8bit, {"lr": 1e-2, "weight_decay": 0.1}),
    "bitsandbytes 32-bit": (bnb.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_rule_is_the_librarys(name: str) -> None:
    kind, settings = OPTIMIZERS[name]
    watcher = stepped(of(kind, **settings), matrices_only="muon" in name)
    assert watcher.headline == f"agreed in {STEPS} checks", watcher
    compared = [f for check in watcher.checks for f in check.findings if f.stage == "update" and f.unequal is not None]
    assert len(compared) == STEPS * (3 if "muon" in name else 4)


ON_CUDA: dict[str, tuple[Any, dict[str, Any], torch.dtype]] = {
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}, torch.float32),
    "adam, maximize": (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}, torch.float32),
    "adamw, amsgrad": (torch.optim.AdamW, {"amsgrad": True, "betas": (0.9, 0.95)}, torch.float32),
    "adamw, bf16": (torch.optim.AdamW, {"weight_decay": 0.1}, torch.bfloat16),
}


@pytest.mark.parametrize("name", ON_CUDA)
def test_the_fused_kernel_of_cuda_takes_fp32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """V is then 1.3e-5 shorter than with β₂ in FP64, and the rule follows the kernel to the bit."""
    kind, settings, dtype = ON_CUDA[name]
    with fused_on_cuda(monkeypatch):
        watcher = stepped(of(kind, lr=1e-3, fused=True, **settings), dtype=dtype)
    assert "update" not in watcher.headline and "disagreed" not in watcher.headline, watcher
    compared = [f for check in watcher.checks for f in check.findings if f.stage in ("update", "moments")]
    assert max(f.unequal or 0.0 for f in compared) < 1e-3


def test_a_fault_of_the_fused_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with fused_on_cuda(monkeypatch, beta2_off=1e-6):
        watcher = stepped(of(torch.optim.AdamW, fused=True), on_alarm=lambda check: None)
    broken = [f for f in watcher.checks[0].findings if not f.ok]
    assert broken[0].stage == "moments" and broken[0].tap.startswith("exp_avg_sq/")


def test_hyperparameters_in_fp32_are_those_of_no_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes FP64 is accused under the rule of one that takes FP32, and the other way round."""
    monkeypatch.setattr("lockstep.core.parity.watch.snapshot.adam_in_fp32", lambda parameter: True)
    watcher = stepped(of(torch.optim.AdamW, fused=True), on_alarm=lambda check: None)
    assert not all(f.ok for f in watcher.checks[0].findings if f.tap.startswith("exp_avg_sq/"))


@contextmanager
def otherwise(optimizer: Any, **values: Any) -> Iterator[None]:
    """Hyperparameters in force for the while, which its groups do not show before and after."""
    kept = [{key: group[key] for key in values} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group.update({key: value(group[key]) if callable(value) else value for key, value in values.items()})
    yield
    for group, old in zip(optimizer.param_groups, kept, strict=True):
        group.update(old)


def faulty(kind: Any, fault: str, number: list[int]) -> Any:
    """Return the class with a fault inside its step."""

    class Faulty(kind):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            number[0] += 1
            group = self.param_groups[0]
            values: dict[str, Any] = {}
            if fault == "rate off by 1 %":
                values = {"lr": lambda lr: lr * 1.01}
            elif fault == "decay dropped":
                values = {"weight_decay": 0.0}
            elif fault == "betas swapped" and "betas" in group:
                values = {"betas": lambda betas: (betas[1], betas[0])}
            elif fault == "betas swapped" and "beta2_decay" in group:
                values = {"beta2_decay": -0.5}
            elif fault == "betas swapped":
                values = {"momentum": lambda momentum: 0.9 * momentum}
            elif number[0] == 3:
                self.state.clear()
            with otherwise(self, **values):
                super().step()

    return Faulty


FAULTS = ("rate off by 1 %", "decay dropped", "betas swapped", "momentum reset")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fault_of_the_optimizer_is_caught(name: str, fault: str) -> None:
    kind, settings = OPTIMIZERS[name]
    if name == "sgd" and fault in ("betas swapped", "momentum reset"):
        pytest.skip("SGD without momentum keeps nothing")
    honest = kind([nn.Parameter(torch.zeros(4, 4))], **settings)
    made = of(faulty(kind, fault, [0]), **settings)
    watcher = stepped(made, matrices_only="muon" in name, rule=rule_of(honest))
    first = next((check for check in watcher.checks if check.verdict == "disagreed"), None)
    assert first is not None, watcher
    # SGD's first buffer is its gradient, whatever its momentum; Adafactor's first weight is 1.
    late = fault == "betas swapped" and name in ("sgd, momentum, dampening", "adafactor", "adafactor, foreach")
    assert first.step == (3 if fault == "momentum reset" else 2 if late else 1), watcher
    assert {f.stage for f in first.findings if not f.ok} <= {"moments", "update", "step_count"}


class RootOfSum(torch.optim.AdamW):
    """√(v̂ + ε) for √v̂ + ε."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                entry = self.state[p]
                if not entry:
                    moments = {kind: torch.zeros_like(p) for kind in ("exp_avg", "exp_avg_sq")}
                    entry |= {"step": torch.tensor(0.0), **moments}
                entry["step"] += 1
                t, (beta1, beta2) = entry["step"].item(), group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                entry["exp_avg"].lerp_(p.grad, 1 - beta1)
                entry["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                root = (entry["exp_avg_sq"] / (1 - beta2**t) + group["eps"]).sqrt()
                p.addcdiv_(entry["exp_avg"], root, value=-group["lr"] / (1 - beta1**t))


def test_epsilon_inside_the_root_is_caught() -> None:
    watcher = stepped(of(RootOfSum, lr=1e-2), rule="adamw")
    assert watcher.checks[0].verdict == "disagreed"
    assert {f.stage for f in watcher.checks[0].findings if not f.ok} == {"update"}
    honest = stepped(of(RootOfSum, lr=1e-2, eps=1e-30), rule="adamw")
    assert honest.verdict == "agreed", honest


def test_adamw_that_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scalars are FP32 tensors, on CUDA; the CPU refuses that, and computes the same where it is let."""
    from torch.optim import adam

    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda *_: ["cpu"])
    settings = {"lr": 1e-2, "weight_decay": 0.1, "capturable": True, "foreach": False}
    assert stepped(of(torch.optim.AdamW, **settings)).headline == f"agreed in {STEPS} checks"


@pytest.mark.parametrize("name", ["sgd, momentum, dampening", "adamw", "muon", "torchao adamw", "adafactor"])
def test_weights_in_bf16_agree(name: str) -> None:
    kind, settings = OPTIMIZERS[name]
    watcher = stepped(of(kind, **settings), matrices_only="muon" in name, dtype=torch.bfloat16)
    assert "update" not in watcher.headline and "disagreed" not in watcher.headline, watcher
    assert all(any(f.stage == "update" and f.unequal is not None for f in check.findings) for check in watcher.checks)


@pytest.mark.parametrize("name", ["muon", "torchao adamw"])
def test_fp64_weights_whose_update_is_narrower_are_not_judged(name: str) -> None:
    kind, settings = OPTIMIZERS[name]
    watcher = stepped(of(kind, **settings), matrices_only="muon" in name, dtype=torch.float64)
    assert f"agreed in {STEPS} checks; update: not judged (FP64 weights, but " in watcher.headline


def test_what_has_no_rule_is_named() -> None:
    kinds = (torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Adagrad, ao.AdamWFp8, bnb.Lion8bit)
    for kind in kinds:
        watcher = stepped(of(kind, lr=1e-3))
        assert watcher.headline == f"agreed in {STEPS} checks; update: not judged ({kind.__name__} has no rule)"


def test_zeros_in_codes_are_zeros() -> None:
    """The library gives a block of zeros the code of −0.993 and the scale 0."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(64, 96))
    optimizer = bnb.AdamW8bit([p], lr=1e-3)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    from lockstep.core.parity.watch.snapshot import snapshot

    found = snapshot({"p": p}, [optimizer])
    assert found.coded == {"p"}
    assert all(not np.signbit(m["p"]).any() and not m["p"].any() for m in found.moments.values())
