"""A model with bf16 weights, whose gradients are clipped to a norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep import watch
from lockstep.scripts.museum import small
from lockstep.scripts.museum.seen import Seen

STEPS, CLIP = 24, 0.5


def loss_of(model: Any, batch: Tensor) -> Tensor:
    """Compute the mean loss a token."""
    return small.next_token_loss(model(input_ids=batch).logits, batch)


def clip(model: Any, mended: bool) -> None:
    """Clip with torch's function; mended: by a norm that is taken in FP32."""
    if not mended:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        return
    norm = torch.nn.utils.get_total_norm([p.grad.float() for p in model.parameters()])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)


def loop(mended: bool = False) -> Seen:
    """Train for 24 steps."""
    model = small.llama().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    watcher = watch(model, optimizer, loss=loss_of, every=1, clip_norm=CLIP)
    for batch in small.text()[: 4 * STEPS].split(4):
        loss = loss_of(model, batch)
        loss.backward()
        with watcher.step(batch, loss):
            clip(model, mended)
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Seen(watcher, losses, small.held_out(model))
