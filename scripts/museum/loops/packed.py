"""Documents side by side in one row, without padding, under transformers' Trainer."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import DataCollatorWithFlattening, Trainer

from lockstep import watch_trainer
from lockstep.scripts.museum import small
from lockstep.scripts.museum.seen import Seen

STEPS, DOCUMENTS = 48, 4


def each_alone(model: Any, inputs: Any) -> Tensor:
    """Compute the mean loss per target, with every document in a row of its own."""
    starts = (inputs["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    total: Any = 0.0
    for start, end in zip(starts, [*starts[1:], inputs["input_ids"].shape[1]], strict=True):
        ids = inputs["input_ids"][:, start:end]
        total = total + F.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum")
    return total / (inputs["input_ids"].shape[1] - len(starts))


def documents() -> list[dict[str, list[int]]]:
    """Return the training texts, of 8 to 32 tokens each."""
    return [{"input_ids": ids[: 8 + 7 * i % 25].tolist()} for i, ids in enumerate(small.text()[: STEPS * DOCUMENTS])]


def loop() -> Seen:
    """Train for 48 steps of 4 documents."""
    model = small.llama()
    # transformers 4.57 makes no document mask if there is a cache.
    model.config.use_cache = False
    trainer = Trainer(
        model=model,
        args=small.arguments("out", per_device_train_batch_size=DOCUMENTS),
        train_dataset=documents(),
        data_collator=DataCollatorWithFlattening(),
    )
    watcher = watch_trainer(trainer, every=1, loss=each_alone)
    trainer.train()
    return Seen(watcher, small.logged(trainer), small.held_out(model))
