"""Lightning divides an epoch's last, shorter accumulation by the full number. Exit code 1: the bug is there."""

# python lightning_last_window.py

import sys
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader


class Module(L.LightningModule):
    """A module with one weight; it keeps the gradients at each call of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = torch.nn.Linear(1, 1, bias=False)
        self.found: list[float] = []

    def training_step(self, batch: Any) -> Any:
        """Return the mean output."""
        return self.layer(batch).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Keep the gradient."""
        self.found.append(float(self.layer.weight.grad))

    def configure_optimizers(self) -> Any:
        """Return an optimizer that changes nothing."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


module = Module()
trainer = L.Trainer(max_epochs=1, accumulate_grad_batches=4, accelerator="cpu", logger=False,
                    enable_checkpointing=False, enable_progress_bar=False)  # fmt: skip
# Six micro-batches of ones: the gradient of the mean output is 1 for any number of accumulated micro-batches.
ones: Any = torch.ones(6, 1)
trainer.fit(module, DataLoader(ones))
print(
    f"lightning {L.__version__}: gradient of the window of 4: {module.found[0]}, of the last, of 2: {module.found[1]}"
)
sys.exit(abs(module.found[1] - 1) > 1e-6)
