"""Documents side by side in one row, without padding, in a plain training loop."""

from __future__ import annotations

import torch
from transformers import DataCollatorWithFlattening

from lockstep import watch
from lockstep.scripts.museum import small
from lockstep.scripts.museum.loops.packed import DOCUMENTS, STEPS, documents, each_alone
from lockstep.scripts.museum.seen import Seen


def loop(mended: bool = False) -> Seen:
    """Train for 48 steps of 4 documents. mended: turn the cache of keys and values off."""
    model, collate = small.llama(), DataCollatorWithFlattening(return_tensors="pt")
    if mended:
        model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    texts, losses = documents(), []
    watcher = watch(model, optimizer, loss=each_alone, every=1)
    for first in range(0, STEPS * DOCUMENTS, DOCUMENTS):
        batch = collate(texts[first : first + DOCUMENTS])
        loss = model(**batch).loss
        loss.backward()
        with watcher.step(batch, loss):
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Seen(watcher, losses, small.held_out(model))
