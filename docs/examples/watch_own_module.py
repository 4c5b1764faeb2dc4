"""Watch somebody's own training loop against their own module in FP64: three lines. Runs on a CPU in seconds."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from lockstep import watch  # 1


def loss_of(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens), targets)


def main():
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    layers = nn.Embedding(256, 16), nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 256)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watcher = watch(model, optimizer, loss=loss_of, every=10, clip_norm=1.0)  # 2
    for _ in range(30):
        at = torch.randint(len(text) - 4, (64, 1))
        windows = text[at + torch.arange(5)]
        batch = windows[:, :4], windows[:, 4]
        loss = loss_of(model, batch)
        loss.backward()
        with watcher.step(batch, loss):  # 3
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
    return watcher


if __name__ == "__main__":
    print(main())
