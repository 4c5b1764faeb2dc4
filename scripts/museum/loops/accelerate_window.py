"""A loop with accelerate's gradient accumulation, and an epoch that is no multiple of it."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep import watch_accelerate
from lockstep.scripts.museum import small
from lockstep.scripts.museum.seen import Seen

MICRO_BATCHES, ACCUMULATION, EPOCHS = 22, 4, 2


def loss_of(model: Any, batch: Tensor) -> Tensor:
    """Compute the mean loss a token."""
    return small.next_token_loss(model(input_ids=batch).logits, batch)


def loop(mended: bool = False) -> Seen:
    """Train for some epochs. mended: leave out the micro-batches of an incomplete step."""
    count = MICRO_BATCHES // ACCUMULATION * ACCUMULATION if mended else MICRO_BATCHES
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, cpu=True)
    model = small.llama()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows: Any = small.text()[: 2 * count]
    loader: Any = DataLoader(rows, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    watcher = watch_accelerate(accelerator, model, optimizer, loss=loss_of, every=1)
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                losses.append(loss.item())
                accelerator.backward(loss)
                with watcher.step(batch, loss):
                    optimizer.step()
                optimizer.zero_grad()
    return Seen(watcher, losses, small.held_out(model))
