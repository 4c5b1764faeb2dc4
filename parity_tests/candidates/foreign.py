"""Models written without Lockstep: fused projections, other names of modules, other layouts of weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class GptBlock(nn.Module):
    """A block of GPT-2, with q, k and v in one linear layer."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        parts = self.qkv(self.ln1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """GPT-2, with the position embedding as a parameter of the model itself, without a module."""

    def __init__(self, vocab, width, layers, heads, positions):
        super().__init__()
        self.wte, self.positions = nn.Embedding(vocab, width), nn.Parameter(torch.zeros(positions, width))
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.out.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def turned(x, cos, sin):
    """Rotate the pairs (2i, 2i + 1) of each head, as Meta's Llama does. x: (B, H, S, E)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


class LlamaBlock(nn.Module):
    """A block of Llama: one linear layer for q, k and v, interleaved by KV head, and one for gate and up."""

    def __init__(self, width, heads, kv_heads, wide, eps):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.before, self.between = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.size, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * wide, bias=False), nn.Linear(wide, width, bias=False)

    def forward(self, x, cos, sin):
        groups = self.qkv(self.before(x)).unflatten(-1, (self.kv_heads, -1, self.size))
        q, k, v = groups.split((self.heads // self.kv_heads, 1, 1), 3)
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.between(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """Llama whose head does not share the embedding's weight."""

    def __init__(self, vocab, width, layers, heads, kv_heads, wide, eps, theta):
        super().__init__()
        self.theta, self.size = theta, width // heads
        self.wte, self.norm = nn.Embedding(vocab, width), nn.RMSNorm(width, eps)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, kv_heads, wide, eps) for _ in range(layers))
        self.out = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        frequency = self.theta ** -(torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
        angle = torch.arange(ids.shape[1])[:, None] * frequency
        cos, sin, x = angle.cos().float(), angle.sin().float(), self.wte(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.out(self.norm(x))
