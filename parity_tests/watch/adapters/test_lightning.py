"""`watch_lightning` on Lightning's own Trainer, which the tests do not install: they are skipped without it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import Disagreed, watch_lightning
from lockstep.core.errors import UserError
from lockstep.parity_tests.watch.own import Batch, Gpt, batches, gpt_loss
from lockstep.torch_backend.watch.adapters.library_watcher import LibraryWatcher

L: Any = pytest.importorskip("lightning")

CLIP, STEPS = 0.5, 3
AGREED = "agreed in 3 checks against your own module"


class Module(L.LightningModule):
    """A small GPT with a schedule, that logs."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = Gpt()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = gpt_loss(self, batch)
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TimesAccumulation(Module):
    """A loss that Lightning divides by the number of micro-batches, and that nobody should multiply."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss * self.trainer.accumulate_grad_batches, *args, **kwargs)


class NeverClips(Module):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Forget it."""


class ClipsTwice(Module):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), CLIP / 2)


class NeverZeroes(Module):
    def optimizer_zero_grad(self, *_: Any) -> None:
        """Forget it."""


class ScalesOne(Module):
    def on_after_backward(self) -> None:
        gradient = dict(self.named_parameters())["gpt.blocks.0.qkv.weight"].grad
        assert gradient is not None
        gradient.mul_(1.05)


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class LooksAtTrainer(Module):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        assert self.trainer is not None
        return super().training_step(batch, batch_idx)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    yield
    logging.getLogger("lightning.pytorch").setLevel(logging.NOTSET)


def run(
    folder: Path,
    kind: type[Module] = Module,
    parts: int = 1,
    spare: int = 0,
    watcher: LibraryWatcher | None = None,
    **settings: Any,
) -> LibraryWatcher:
    torch.manual_seed(0)
    module = kind()
    watcher = watcher or watch_lightning(every=1)
    trainer = L.Trainer(
        callbacks=[watcher], max_epochs=1, accumulate_grad_batches=parts, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(folder),
        **{"gradient_clip_val": CLIP} | settings,
    )  # fmt: skip
    try:
        data: Any = batches(STEPS * parts - spare)
        trainer.fit(module, DataLoader(data, batch_size=None))
    finally:
        assert "optimizer_step" not in vars(module)
    return watcher


def broken(watcher: LibraryWatcher) -> tuple[int, set[str], str]:
    check = next(check for check in watcher.checks if check.verdict == "disagreed")
    return check.step, {f.stage for f in check.findings if not f.ok}, check.cause or ""


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_clean_run_agrees(tmp_path: Path, parts: int, precision: str) -> None:
    watcher = run(tmp_path, parts=parts, precision=precision)
    assert watcher.headline == AGREED, str(watcher)
    for check in watcher.checks:
        assert {"loss", "gradients", "update", "clip_coefficient"} <= {f.stage for f in check.findings}


@pytest.mark.parametrize(
    ("kind", "step", "stages", "cause"),
    [
        (TimesAccumulation, 1, {"gradients"}, "right direction, 2 times the right length"),
        (NeverClips, 1, {"clip_coefficient"}, ""),
        (ClipsTwice, 1, {"clip_coefficient"}, ""),
        (NeverZeroes, 2, {"gradients"}, ""),
        (ScalesOne, 1, {"gradients"}, "the gradient of gpt.blocks.0.qkv.weight"),
    ],
)
def test_a_fault_is_caught_and_named(
    tmp_path: Path, kind: type[Module], step: int, stages: set[str], cause: str
) -> None:
    watcher = run(tmp_path, kind, parts=2)
    assert broken(watcher)[:2] == (step, stages), str(watcher)
    assert cause in broken(watcher)[2], str(watcher)


def test_a_last_window_of_fewer_micro_batches_is_divided_by_too_many(tmp_path: Path) -> None:
    """FINDING, Lightning 2.6: a loss is divided by `accumulate_grad_batches` also where an epoch's end leaves fewer."""
    watcher = run(tmp_path, parts=2, spare=1)
    assert broken(watcher)[:2] == (3, {"loss", "gradients"}), str(watcher)
    assert "right direction, 0.5 times the right length" in broken(watcher)[2]
    as_it_is = watch_lightning(every=1, accumulate=lambda parts: [1 / 2] * len(parts))
    assert run(tmp_path, parts=2, spare=1, watcher=as_it_is).headline == AGREED


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    """It is needed where `training_step` reads the trainer, which a copy of the module does not have."""
    alone = run(tmp_path, LooksAtTrainer)
    assert alone.verdict == "could_not"
    assert "not attached to a `Trainer`" in alone.headline
    assert run(tmp_path, LooksAtTrainer, watcher=watch_lightning(every=1, loss=gpt_loss)).headline == AGREED


def test_training_stops_where_asked(tmp_path: Path) -> None:
    with pytest.raises(Disagreed):
        run(tmp_path, NeverClips, watcher=watch_lightning(every=1, on_alarm="stop"))


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (Manual, {"gradient_clip_val": None}, "manual optimisation"),
        (Module, {"gradient_clip_algorithm": "value"}, "clipped by value"),
    ],
)
def test_a_run_that_cannot_be_watched_is_refused(
    tmp_path: Path, kind: type[Module], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        run(tmp_path, kind, **settings)
