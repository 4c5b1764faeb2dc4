"""User models and a loop for `watch(model, optimizer, loss=fn)`: a small GPT, and Hugging Face's GPT-2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import watch
from lockstep.core.parity.watch.api import Watcher

VOCAB, WIDTH, HEADS, LENGTH, ROWS = 97, 32, 2, 12, 4

Batch = dict[str, Tensor]


class Block(nn.Module):
    """A pre-norm block of attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (t.view(rows, length, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A GPT of two blocks with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt_loss(model: Any, batch: Batch) -> Tensor:
    """Return the mean loss over tokens that are not padding."""
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten(), ignore_index=-1)


def gpt2_loss(model: Any, batch: Batch) -> Tensor:
    return model(input_ids=batch["tokens"], labels=batch["targets"].clamp(min=0)).loss


def gpt2(attention: str) -> nn.Module:
    # Importing transformers takes long, and not all tests that use this file need it.
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=HEADS, attn_implementation=attention,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Batch], Tensor]]] = {
    "gpt": (Gpt, gpt_loss),
    "gpt2, eager": (lambda: gpt2("eager"), gpt2_loss),
    "gpt2, sdpa": (lambda: gpt2("sdpa"), gpt2_loss),
}
PRECISIONS = ("fp32", "autocast", "bf16 weights")


def batches(count: int, seed: int = 0) -> list[Batch]:
    """Return `count` random batches of token ids and targets."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator) for _ in range(count)]
    return [{"tokens": x[:, :-1], "targets": x[:, 1:]} for x in drawn]


def nothing(*_: Any) -> None:
    """Plant no fault."""


def train(
    name: str = "gpt",
    trains: str = "fp32",
    steps: int = 3,
    *,
    seed: int = 0,
    model: nn.Module | None = None,
    wrap: Callable[[nn.Module], Any] = lambda model: model,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    spoil: Callable[[nn.Module, int], None] = nothing,
    clip: Callable[[nn.Module], None] = nothing,
    during: Callable[[], AbstractContextManager[Any]] = nullcontext,
    data: Sequence[Batch] | None = None,
    lr: float = 1e-2,
    **settings: Any,
) -> Watcher:
    """Train the model `name` under `watch`, in one of `PRECISIONS`; return the watcher.

    during: a context for the candidate's forward and backward pass. spoil: plants a fault between these and the
    watcher's block.
    """
    torch.manual_seed(seed)
    make, loss_of = MODELS[name]
    own = model or make()
    own = own.bfloat16() if trains == "bf16 weights" else own
    wrapped = wrap(own)
    stepper = optimizer(own.parameters(), lr=lr)
    declared = {"precision": "bf16"} if trains == "autocast" else {}
    watcher = watch(wrapped, stepper, **{"loss": loss_of, "every": 1, **declared, **settings})
    device = next(own.parameters()).device
    for number, made in enumerate(data or batches(steps, seed)):
        batch = {key: x.to(device) for key, x in made.items()} if device.type == "cuda" else made
        with during(), torch.autocast(device.type, torch.bfloat16, enabled=trains == "autocast"):
            loss = loss_of(wrapped, batch)
        with during():
            loss.backward()
        spoil(own, number)
        with watcher.step(batch, loss):
            clip(own)
            stepper.step()
        stepper.zero_grad()
    return watcher
