"""Lightning with gradient accumulation, and an epoch that is no multiple of it."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lockstep import watch_lightning
from lockstep.scripts.museum import small
from lockstep.scripts.museum.seen import Seen

MICRO_BATCHES, ACCUMULATION = 22, 4


class Module(L.LightningModule):
    """A small Llama, its loss and AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small.llama()

    def training_step(self, batch: Any, index: int) -> Any:
        """Return the mean loss a token."""
        return small.next_token_loss(self.model(input_ids=batch).logits, batch)

    def configure_optimizers(self) -> Any:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Losses(L.Callback):
    """A callback that keeps the loss of every micro-batch, as the module returned it."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        """Keep a loss, before it was divided."""
        self.values.append(float(outputs["loss"]) * ACCUMULATION)


def loop(mended: bool = False) -> Seen:
    """Train for 2 epochs. mended: leave out the micro-batches of an incomplete step."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    count = MICRO_BATCHES // ACCUMULATION * ACCUMULATION if mended else MICRO_BATCHES
    rows: Any = small.text()[: 2 * count]
    loader: Any = DataLoader(rows, batch_size=2)
    module, losses = Module(), Losses()
    watcher = watch_lightning(every=1)
    trainer = L.Trainer(
        callbacks=[watcher, losses], max_epochs=2, accumulate_grad_batches=ACCUMULATION, accelerator="cpu",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    return Seen(watcher, losses.values, small.held_out(module.model))
