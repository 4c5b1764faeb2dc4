"""The training loop of nanoGPT (Karpathy 2022) with a Llama in plain PyTorch, written for speed.

It uses fused AdamW, sets gradients to None, and has torch's own attention, RMSNorm and cross-entropy, whole logits,
autocast for bf16, and torch.compile of the model for compiled rows.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.core.config.schema import ModelConfig
from lockstep.torch_backend.tools.peers.race import Race, Turn


def rotate(x_BHSE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2) of each head."""
    left, right = x_BHSE.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        kv = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, config.hidden, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden, kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden, kv, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.hidden, config.hidden, bias=config.o_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map x (B, S, D) → (B, S, D)."""
        rows, length, _ = x.shape
        q = self.q_proj(x).view(rows, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn_hidden, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden, config.ffn_hidden, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.ffn_hidden, config.hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, S, D) → (B, S, D)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and SwiGLU, each after a norm and with a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map x (B, S, D) → (B, S, D)."""
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Llama: tokens (B, S), targets (B, S) → the mean cross-entropy."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.lm_head = None if config.tied else nn.Linear(config.hidden, config.vocab_size, bias=False)
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        angle = torch.arange(length, dtype=torch.float64)[:, None] * config.rope_theta**-exponent
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean cross-entropy, a scalar."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        weight = (self.lm_head or self.embed).weight
        logits = F.linear(self.final_norm(x), weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def run(race: Race, turn: Turn) -> None:
    """Train until `turn` raises Over."""
    config, device = race.config, race.device
    model = Llama(config.model, config.train.sequence_length).to(device)
    model.load_state_dict(race.weights())
    optimizer = race.fused_adamw(dict(model.named_parameters()))
    program: Any = torch.compile(model) if config.compile.enabled else model
    narrow = config.precision.chosen.rounds
    steps = race.micro_batches()
    turn(None)
    for step in itertools.count():
        for group in optimizer.param_groups:
            group["lr"] = race.rate(step + 1) * group["lr_factor"]
        micros = steps[step % len(steps)]
        total = torch.zeros((), device=device)
        for tokens, targets in micros:
            with torch.autocast(device.type, torch.bfloat16) if narrow else nullcontext():
                loss = program(tokens, targets) / len(micros)
            loss.backward()
            total += loss.detach()
        if config.optim.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turn(total.item())
