"""The training loop of a stub exhibit: a package that a test writes sets the factor by which gradients are wrong."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor, nn

from lockstep import watch
from lockstep.scripts.museum.seen import Seen


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def loop(steps: int, mended: bool = False) -> Seen:
    factor = 1.0 if mended else importlib.import_module("nobody_has_this").FACTOR
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    watcher = watch(model, optimizer, loss=mean, every=1)
    for step in range(steps):
        batch = torch.randn(4, 8)
        loss = mean(model, batch)
        (loss * (factor if step else 1.0)).backward()
        with watcher.step(batch, loss):
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Seen(watcher, losses)
