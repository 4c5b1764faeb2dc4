"""accelerate divides an epoch's last, shorter accumulation by the full number. Exit code 1: the bug is there."""

# python accelerate_last_window.py

import sys
from importlib.metadata import version
from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch.utils.data import DataLoader

accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
weight: Any = torch.nn.Linear(1, 1, bias=False)
optimizer: Any = torch.optim.SGD(weight.parameters(), lr=0.0)
ones: Any = torch.ones(6, 1)
# Six micro-batches of ones: the gradient of the mean output is 1 for any number of accumulated micro-batches.
model, optimizer, loader = accelerator.prepare(weight, optimizer, DataLoader(ones))
found = []
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).mean())
        if accelerator.sync_gradients:
            found.append(float(weight.weight.grad))
        optimizer.step()
        optimizer.zero_grad()
print(f"accelerate {version('accelerate')}: gradient of the window of 4: {found[0]}, of the last, of 2: {found[1]}")
sys.exit(abs(found[1] - 1) > 1e-6)
