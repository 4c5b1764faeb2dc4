"""Llama 3 in PyTorch. Twin: jax_backend/model.py, line by line.

Tensors carry their axes: B batch, S sequence, D hidden, H query heads, K key-value heads, E head dim, F feed-forward,
V vocabulary. Everything is in the policy's stream dtype; casts stand in torch_backend/precision.py and at attention's
inputs. Parameter names are the canonical ones of core/model/names.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.core.config.schema import ModelConfig, RunConfig
from lockstep.torch_backend.attention import Kernel, Mask
from lockstep.torch_backend.kernels.chunked_loss import chunked_loss
from lockstep.torch_backend.kernels.embedding import embedding
from lockstep.torch_backend.kernels.float8 import Float8
from lockstep.torch_backend.kernels.library_heads import library_loss
from lockstep.torch_backend.kernels.recompute import KEPT, Recompute, of_layer
from lockstep.torch_backend.kernels.recompute_products import gated, scaled
from lockstep.torch_backend.loss import negative_log_likelihood, weighted_mean
from lockstep.torch_backend.precision import Policy, head, linear

Tap = Callable[[str, Tensor], Tensor]


class Rope(NamedTuple):
    """Where tokens stand, for every block.

    cos, sin: (S, E/2), or (B, S, E/2) where positions count from 0 in each document. mask: which keys each query sees,
    as the kernel takes it, or None: all that do not come after it.
    """

    cos: Tensor
    sin: Tensor
    mask: Mask | None = None


def no_tap(name: str, value: Tensor) -> Tensor:
    """The tap of the program that trains: nothing."""
    return value


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """X (…, D) / √(mean(x²) + eps) · gain (Zhang & Sennrich 2019)."""
    return scaled(x, torch.rsqrt(x.square().mean(-1, keepdim=True) + eps), weight)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · gain."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """X (…, D) → (…, D)."""
        return rms_norm(x, self.weight, self.eps)


class Linear(nn.Module):
    """x · Wᵀ + b with the policy's casts; W is (out, in)."""

    def __init__(self, into: int, out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, into))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None
        self.float8: Float8 | None = None

    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        """X (…, in) → (…, out)."""
        # A layer in FP8 is so under the run's own policy; `evaluate` may ask for another one.
        return linear(x, self.weight, self.bias, policy, self.float8 if policy.operand == torch.bfloat16 else None)


def rope_tables(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cos and sin (S, E/2) of position · theta^(−2i/E) (Su et al. 2021), in FP64."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angle = torch.arange(length, dtype=torch.float64)[:, None] * theta**-exponent
    return angle.cos(), angle.sin()


def positions(documents_BS: Tensor) -> Tensor:
    """Position of each token in its own document, from 0: (B, S), counted from where the document begins."""
    place_BS = torch.arange(documents_BS.shape[1], device=documents_BS.device).expand_as(documents_BS)
    begins_BS = F.pad(documents_BS.diff(dim=1) != 0, (1, 0))
    return place_BS - torch.where(begins_BS, place_BS, 0).cummax(1).values


def rope_at(rope_tables: tuple[Tensor, Tensor], places: Tensor | None, policy: Policy) -> Rope:
    """The tables in the stream dtype; of these positions (B, S) if they are given."""
    cos, sin = rope_tables if places is None else (table[places] for table in rope_tables)
    return Rope(cos.to(policy.stream), sin.to(policy.stream))


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023) with rotary positions."""

    def __init__(self, config: ModelConfig, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        kv = config.kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden, config.hidden, config.qkv_bias)
        self.k_proj = Linear(config.hidden, kv, config.qkv_bias)
        self.v_proj = Linear(config.hidden, kv, config.qkv_bias)
        self.o_proj = Linear(config.hidden, config.hidden, config.o_bias)

    def rotate(self, x_BSHE: Tensor, rope: Rope) -> Tensor:
        """Rotate each pair (i, i + E/2) of a head by its position's angle, paired as in Hugging Face's Llama."""
        cos, sin = rope.cos[..., None, :], rope.sin[..., None, :]
        left, right = x_BSHE.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    def expand(self, x_BSKE: Tensor) -> Tensor:
        """Give each query head its key-value head: (B, S, K, E) → (B, S, H, E), each KV head repeated in place."""
        return x_BSKE.repeat_interleave(self.heads // self.kv_heads, dim=2)

    def attend(
        self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, policy: Policy, mask: Mask | None = None
    ) -> Tensor:
        """softmax(q·kᵀ/√E + mask)·v → (B, S, H, E), operands and output in the operand dtype."""
        q = q_BSHE.to(policy.operand).transpose(1, 2)
        k = self.expand(k_BSKE).to(policy.operand).transpose(1, 2)
        v = self.expand(v_BSKE).to(policy.operand).transpose(1, 2)
        out_BHSE = self.kernel(q, k, v, mask)
        return out_BHSE.transpose(1, 2).to(policy.stream)

    def forward(self, x_BSD: Tensor, rope: Rope, policy: Policy, tap: Tap, name: str) -> Tensor:
        """X (B, S, D), already normed → (B, S, D)."""
        q_BSD = tap(f"{name}.q", self.q_proj(tap(f"{name}.q.x", x_BSD), policy))
        k_BSD = tap(f"{name}.k", self.k_proj(tap(f"{name}.k.x", x_BSD), policy))
        v_BSD = tap(f"{name}.v", self.v_proj(tap(f"{name}.v.x", x_BSD), policy))
        q_BSHE = q_BSD.unflatten(-1, (self.heads, self.head_dim))
        k_BSKE = k_BSD.unflatten(-1, (self.kv_heads, self.head_dim))
        v_BSKE = v_BSD.unflatten(-1, (self.kv_heads, self.head_dim))
        q_BSHE = tap(f"{name}.q_rope", self.rotate(q_BSHE, rope))
        k_BSKE = tap(f"{name}.k_rope", self.rotate(k_BSKE, rope))
        # A candidate's own `attend` (docs/guide/candidates.md) needs no mask where the run has none.
        mask = () if rope.mask is None else (rope.mask,)
        out_BSD = tap(f"{name}.out", self.attend(q_BSHE, k_BSKE, v_BSKE, policy, *mask).flatten(2))
        return tap(f"{name}.o_proj", self.o_proj(out_BSD, policy))


class SwiGLU(nn.Module):
    """W_down · (silu(W_gate·x) ⊙ W_up·x) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden, config.ffn_hidden, config.mlp_bias)
        self.up_proj = Linear(config.hidden, config.ffn_hidden, config.mlp_bias)
        self.down_proj = Linear(config.ffn_hidden, config.hidden, config.mlp_bias)

    def activate(self, gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
        """silu(gate) ⊙ up."""
        return gated(gate_BSF, up_BSF)

    def forward(self, x_BSD: Tensor, policy: Policy, tap: Tap, name: str) -> Tensor:
        """X (B, S, D), already normed → (B, S, D)."""
        gate_BSF = tap(f"{name}.gate", self.gate_proj(tap(f"{name}.gate.x", x_BSD), policy))
        up_BSF = tap(f"{name}.up", self.up_proj(tap(f"{name}.up.x", x_BSD), policy))
        act_BSF = tap(f"{name}.act", self.activate(gate_BSF, up_BSF))
        return tap(f"{name}.down_proj", self.down_proj(act_BSF, policy))


class Block(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, config: ModelConfig, kernel: Kernel, recompute: Recompute) -> None:
        super().__init__()
        self.recompute = recompute
        self.attn_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attn = Attention(config, kernel)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x_BSD: Tensor, rope: Rope, policy: Policy, tap: Tap, name: str) -> Tensor:
        """X (B, S, D) → (B, S, D)."""
        run = self.recompute
        normed_BSD = tap(f"{name}.attn_norm", run("norms", self.attn_norm, tap(f"{name}.attn_norm.x", x_BSD)))
        mixed_BSD = run("attention", self.attn, normed_BSD, rope, policy, tap, f"{name}.attn")
        x_BSD = tap(f"{name}.attn_residual", tap(f"{name}.attn_residual.x", x_BSD) + mixed_BSD)
        normed_BSD = tap(f"{name}.mlp_norm", run("norms", self.mlp_norm, tap(f"{name}.mlp_norm.x", x_BSD)))
        mixed_BSD = run("mlp", self.mlp, normed_BSD, policy, tap, f"{name}.mlp")
        return tap(f"{name}.mlp_residual", tap(f"{name}.mlp_residual.x", x_BSD) + mixed_BSD)


class Embedding(nn.Module):
    """A table (V, D) and its look-up, in the stream dtype."""

    def __init__(self, vocab_size: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Tokens (B, S) → (B, S, D)."""
        return embedding(tokens_BS, self.weight)


class Head(nn.Module):
    """The untied head's weight (V, D); a tied one uses the embedding's."""

    def __init__(self, vocab_size: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden))


class Llama(nn.Module):
    """Tokens (B, S) → logits (B, S, V) → negative log-likelihood of the targets (B, S)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, run: RunConfig) -> None:
        super().__init__()
        config, max_length = run.model, run.train.longest
        self.tap: Tap = no_tap
        self.recompute = of_layer(run.recompute, None)
        # Whether whole blocks are computed again also where a tap looks.
        self.tapped_again = True
        self.head = run.loss
        self.chunked_loss, self.library_loss = chunked_loss, library_loss
        self.z_loss = run.loss.z_loss
        self.kernel = Kernel(run.attention.kernel, run.deterministic)
        self.document_mask, self.reset_positions = run.attention.document_mask, run.attention.reset_positions
        self.rope = max_length, config.head_dim, config.rope_theta
        self.place_rope(torch.get_default_device())
        self.embed = Embedding(config.vocab_size, config.hidden)
        plans = (of_layer(run.recompute, i) for i in range(config.layers))
        self.blocks = nn.ModuleList(Block(config, self.kernel, plan) for plan in plans)
        self.final_norm = RMSNorm(config.hidden, config.norm_eps)
        self.lm_head = None if config.tied else Head(config.vocab_size, config.hidden)

    def place_rope(self, device: torch.device) -> None:
        """Make the RoPE tables on a device: buffers in FP64, not part of the state."""
        cos, sin = rope_tables(*self.rope)
        self.register_buffer("cos", cos.to(device), persistent=False)
        self.register_buffer("sin", sin.to(device), persistent=False)

    def places(self, length: int, documents_BS: Tensor | None, policy: Policy) -> Rope:
        """Positions and mask as the configuration asks; a sequence without documents is one document."""
        reset = None if documents_BS is None or not self.reset_positions else positions(documents_BS)
        mask = None if documents_BS is None or not self.document_mask else self.kernel.mask(documents_BS)
        return rope_at((self.cos[:length], self.sin[:length]), reset, policy)._replace(mask=mask)

    def trunk(self, tokens_BS: Tensor, policy: Policy, tap: Tap = no_tap, documents_BS: Tensor | None = None) -> Tensor:
        """Everything before the head: tokens (B, S) → final-norm output (B, S, D)."""
        return self.trunk_at(tokens_BS, self.places(tokens_BS.shape[1], documents_BS, policy), policy, tap)

    def trunk_at(self, tokens_BS: Tensor, rope: Rope, policy: Policy, tap: Tap = no_tap) -> Tensor:
        """The same of tokens at given places."""
        x_BSD = tap("embed", self.recompute("embedding", self.embed, tokens_BS))
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            # Without a tap no block asks for its name: under torch.compile all are one program.
            name = "" if tap is no_tap else f"blocks.{i}"
            run = block.recompute if tap is no_tap or self.tapped_again else KEPT
            x_BSD = run("block", block, x_BSD, rope, policy, tap, name)
        return tap("final_norm", self.recompute("norms", self.final_norm, x_BSD))

    @property
    def has_own_head(self) -> bool:
        """Whether `logits`, `nll` or `forward` were overridden: then a head that asks none of them gives way."""
        names = ("logits", "nll", "forward")
        return any(getattr(type(self), n) is not getattr(Llama, n) or n in self.__dict__ for n in names)

    @property
    def head_weight(self) -> Tensor:
        """The head's weight (V, D)."""
        weight: Tensor = (self.lm_head or self.embed).weight
        return weight

    def logits(self, x_BSD: Tensor, policy: Policy) -> Tensor:
        """Final-norm output (B, S, D) → logits (B, S, V) in the stream dtype."""
        return head(x_BSD, self.tap("logits.weight", self.head_weight), policy)

    def nll(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        """logsumexp(logits) − logit of the target, and the z-loss, (B, S), in the logits' dtype."""
        return negative_log_likelihood(logits_BSV, targets_BS, self.z_loss)

    def forward(
        self, tokens_BS: Tensor, targets_BS: Tensor, policy: Policy, documents_BS: Tensor | None = None
    ) -> Tensor:
        """Per-token loss (B, S) in nats through whole logits; `self.tap` sees every tensor of the chain on its way."""
        tap = self.tap
        logits_BSV = tap("logits", self.logits(self.trunk(tokens_BS, policy, tap, documents_BS), policy))
        return tap("nll", self.nll(logits_BSV, targets_BS))

    def loss(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor,
        weights_BS: Tensor,
        total: Tensor,
        policy: Policy,
        *documents_BS: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Σ weight·loss / total, a float64 scalar, and the per-token losses (B, S), through the head of the run."""
        if self.head.head == "full":
            nll_BS = self(tokens_BS, targets_BS, policy, *documents_BS)
            return weighted_mean(nll_BS, weights_BS, total), nll_BS
        x_BSD = self.trunk(tokens_BS, policy, self.tap, *documents_BS)
        weight_VD = self.tap("logits.weight", self.head_weight)
        arguments = x_BSD, weight_VD, targets_BS, weights_BS, total, policy
        if self.head.of_library:
            return self.library_loss(*arguments, self.head, self.tap)
        tap = None if self.tap is no_tap else self.tap
        return self.chunked_loss(*arguments, self.z_loss, self.head.chunk, tap)

    def scores(
        self, tokens_BS: Tensor, targets_BS: Tensor, policy: Policy, *documents_BS: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Per-token NLL (B, S) without z-loss, and whether the likeliest token is the target (B, S).

        Logits are made for `loss.chunk` tokens at a time, whatever head the run trains with.
        """
        x_ND = self.trunk(tokens_BS, policy, no_tap, *documents_BS).flatten(0, 1)
        targets_N = targets_BS.flatten()
        parts, rows = [], self.head.chunk
        for x, targets in zip(x_ND.split(rows), targets_N.split(rows), strict=True):
            logits = self.logits(x[None], policy)[0]
            parts.append((negative_log_likelihood(logits, targets), logits.argmax(-1) == targets))
        nll, top1 = (torch.cat(each).unflatten(0, targets_BS.shape) for each in zip(*parts, strict=True))
        return nll, top1
