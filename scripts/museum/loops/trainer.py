"""A causal language model and transformers' Trainer, with gradient accumulation."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from lockstep import watch_trainer
from lockstep.scripts.museum import small
from lockstep.scripts.museum.seen import Seen

STEPS, ROWS = 24, 2


def loop(model: str = "llama", data: str = "text", accumulation: int = 4, mended: bool = False) -> Seen:
    """Train for 24 steps. mended: set by hand that the labels are shifted."""
    trained: Any = {"llama": small.llama, "gpt2": small.gpt2}[model]()
    if mended:
        trained.loss_type = "ForCausalLM"
    trainer = Trainer(
        model=trained,
        args=small.arguments("out", per_device_train_batch_size=ROWS, gradient_accumulation_steps=accumulation),
        train_dataset=small.rows(STEPS * ROWS * accumulation, data),
    )
    watcher = watch_trainer(trainer, every=1)
    trainer.train()
    return Seen(watcher, small.logged(trainer), small.held_out(trained))
