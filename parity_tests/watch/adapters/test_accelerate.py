"""`watch_accelerate` with accelerate's own Accelerator: what its accumulation gets right, and what it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import watch_accelerate
from lockstep.core.errors import UserError
from lockstep.parity_tests.watch.own import Gpt, batches, gpt_loss
from lockstep.torch_backend.watch.adapters.accelerate import AccelerateWatcher

CLIP, STEPS, PARTS = 0.5, 3, 2


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Accelerate keeps its settings for the process."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def through_accelerator(accelerator: Any, loss: Tensor) -> None:
    accelerator.backward(loss)


def past_accelerator(_: Any, loss: Tensor) -> None:
    loss.backward()


def clips(accelerator: Any, model: nn.Module) -> None:
    accelerator.clip_grad_norm_(model.parameters(), CLIP)


def run(
    backward: Callable[[Any, Tensor], None] = through_accelerator,
    clip: Callable[[Any, nn.Module], None] = clips,
    spare: int = 0,
    mixed: str = "no",
    **settings: Any,
) -> AccelerateWatcher:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS, mixed_precision=mixed)
    plain = Gpt()
    data: Any = batches(STEPS * PARTS - spare)
    loader: Any = DataLoader(data, batch_size=None)
    model, optimizer, loader = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), loader)
    watcher = watch_accelerate(accelerator, model, optimizer, loss=gpt_loss, every=1, clip_norm=CLIP, **settings)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = gpt_loss(model, batch)
            backward(accelerator, loss)
            with watcher.step(batch, loss):
                if accelerator.sync_gradients:
                    clip(accelerator, model)
                optimizer.step()
            optimizer.zero_grad()
    return watcher


@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_a_clean_run_agrees(mixed: str) -> None:
    watcher = run(mixed=mixed)
    assert watcher.headline == "agreed in 3 checks against your own module", str(watcher)
    for check in watcher.checks:
        assert {"loss", "gradients", "update", "clip_coefficient"} <= {f.stage for f in check.findings}


@pytest.mark.parametrize(
    ("fault", "step", "stages", "factor"),
    [
        ({"spare": 1}, 3, {"loss", "gradients"}, "0.5 times"),
        ({"backward": past_accelerator}, 1, {"gradients"}, "2 times"),
        ({"clip": lambda *_: None}, 1, {"clip_coefficient"}, ""),
    ],
    ids=["a last window of one micro-batch", "backward past the accelerator", "clipping forgotten"],
)
def test_a_fault_is_caught_and_named(fault: dict[str, Any], step: int, stages: set[str], factor: str) -> None:
    """Accelerate divides by `gradient_accumulation_steps` also where a loader's end leaves fewer micro-batches."""
    bad = [check for check in run(**fault).checks if check.verdict == "disagreed"]
    assert bad[0].step == step
    assert {f.stage for f in bad[0].findings if not f.ok} == stages
    assert f"right direction, {factor}" in (bad[0].cause or "") if factor else bad[0].cause is None


def test_a_sum_over_accelerates_divisor_is_what_it_computes() -> None:
    watcher = run(spare=1, accumulate=lambda parts: [1 / PARTS] * len(parts))
    assert watcher.headline == "agreed in 3 checks against your own module", str(watcher)


def test_several_processes_and_fp16_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator.scaler = object()
    with pytest.raises(UserError, match="not support fp16"):
        watch_accelerate(accelerator, model, optimizer, loss=gpt_loss)
    accelerator.scaler = None
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(UserError, match="one process"):
        watch_accelerate(accelerator, model, optimizer, loss=gpt_loss)
