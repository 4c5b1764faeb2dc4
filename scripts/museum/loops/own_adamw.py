"""A causal language model and transformers' own former AdamW."""

from __future__ import annotations

from transformers import Trainer

from lockstep import watch_trainer
from lockstep.scripts.museum import small
from lockstep.scripts.museum.seen import Seen

STEPS, ROWS = 48, 2


def loop(mended: bool = False) -> Seen:
    """Train for 48 steps. mended: take torch's AdamW."""
    model, optim = small.llama(), "adamw_torch" if mended else "adamw_hf"
    args = small.arguments("out", per_device_train_batch_size=ROWS, optim=optim, weight_decay=0.1, max_grad_norm=0.0)
    trainer = Trainer(model=model, args=args, train_dataset=small.rows(STEPS * ROWS))
    watcher = watch_trainer(trainer, every=1, rule="adamw")
    trainer.train()
    return Seen(watcher, small.logged(trainer), small.held_out(model))
