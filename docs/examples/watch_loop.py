"""Watch somebody's own training loop: a torch model, an AdamW, and the same loss in JAX. Runs on a CPU in seconds."""

from pathlib import Path

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import watch
from lockstep.jax_backend.watch import reference


class Model(nn.Module):
    """Next-byte prediction from four bytes."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(256, 16), nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 256)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens).flatten(1))
        return self.down(F.gelu(self.up(x)))


def jax_loss(p, batch):  # the same function, by torch's parameter names, in the dtype of its parameters
    tokens, targets = batch
    x = p["embed.weight"][tokens].reshape(len(tokens), -1)
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    x = x * p["norm.weight"] + p["norm.bias"]
    x = jax.nn.gelu(x @ p["up.weight"].T + p["up.bias"], approximate=False)
    logits = x @ p["down.weight"].T + p["down.bias"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1).mean()


def main():
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watcher = watch(model, optimizer, reference=reference(jax_loss), every=10, clip_norm=1.0)
    for _ in range(30):
        at = torch.randint(len(text) - 4, (64, 1))
        windows = text[at + torch.arange(5)]
        batch = windows[:, :4], windows[:, 4]
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        with watcher.step(batch, loss):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
    return watcher


if __name__ == "__main__":
    print(main())
