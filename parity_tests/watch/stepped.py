"""Steps of an optimizer on random gradients under `watch`, where only the update can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lockstep.core.parity.watch.api import Watcher
from lockstep.torch_backend.watch.api import watch

Made = Callable[[Any], torch.optim.Optimizer]
STEPS = 4


class Weights(nn.Module):
    """A vector, and matrices whose moments fill whole 8-bit blocks, end in a shorter block, or stay in FP32."""

    def __init__(self, matrices_only: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        shapes = {"wide": (64, 96), "tall": (130, 33), "small": (24, 16)} | ({} if matrices_only else {"bias": (48,)})
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(0.1 * torch.randn(shape).to(dtype)))


def stepped(
    make: Made, *, matrices_only: bool = False, dtype: torch.dtype = torch.float32, device: str = "cpu", **settings: Any
) -> Watcher:
    """Step on random gradients under `watch`; return the watcher.

    The gradients are their own reference, so only the update can be wrong.
    """
    torch.manual_seed(0)
    model = Weights(matrices_only, dtype).to(device)
    optimizer = make(list(model.parameters()))
    watcher = watch(model, optimizer, reference=lambda _, batch: (0.0, dict(batch)), every=1, **settings)
    for number in range(STEPS):
        grads = {name: 0.01 * torch.randn_like(p) for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.grad = grads[name].clone()
        if number == 2:  # rows without tokens: zero gradients, which fill whole blocks
            dict(model.named_parameters())["wide"].grad[:8] = grads["wide"][:8] = 0.0  # type: ignore[index]
        batch = {name: (g.float() if dtype is torch.bfloat16 else g).cpu().numpy() for name, g in grads.items()}
        with watcher.step(batch, 0.0), torch.compiler.set_stance("force_eager"):
            optimizer.step()
    return watcher
