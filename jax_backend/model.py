"""Llama 3 in JAX (Flax NNX). Twin: torch_backend/model.py, line by line.

Arrays carry their axes: B batch, S sequence, D hidden, H query heads, K key-value heads, E head dim, F feed-forward,
V vocabulary. Everything is in the policy's stream dtype; roundings stand in jax_backend/precision.py and
jax_backend/attention.py. Paths of parameters, joined by dots, are the canonical names of core/model/names.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from lockstep.core.config.schema import ModelConfig, RunConfig
from lockstep.core.model.names import fp8_modules
from lockstep.jax_backend.attention import attention, document_mask
from lockstep.jax_backend.kernels.float8 import Recipe
from lockstep.jax_backend.kernels.formats import BF16
from lockstep.jax_backend.kernels.library_heads import library_nll
from lockstep.jax_backend.loss import negative_log_likelihood
from lockstep.jax_backend.policy import Policy
from lockstep.jax_backend.precision import head, linear

Tap = Callable[[str, Array], Array]


class Rope(NamedTuple):
    """Where tokens stand, for every block.

    cos, sin: (S, E/2), or (B, S, E/2) where positions count from 0 in each document. mask: (B, 1, S, S) bool, which
    keys each query sees, or None: all that do not come after it.
    """

    cos: Array
    sin: Array
    mask: Array | None = None


def no_tap(name: str, value: Array) -> Array:
    """The tap of the program that trains: nothing."""
    return value


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """X (…, D) / √(mean(x²) + eps) · gain (Zhang & Sennrich 2019)."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps) * weight


class RMSNorm(nnx.Module):
    """x / √(mean(x²) + eps) · gain."""

    def __init__(self, width: int, eps: float) -> None:
        self.eps = eps
        self.weight = nnx.Param(jnp.empty(width, jnp.float32))

    def __call__(self, x: Array) -> Array:
        """X (…, D) → (…, D)."""
        return rms_norm(x, self.weight[...], self.eps)


class Linear(nnx.Module):
    """x · Wᵀ + b with the policy's casts; W is (out, in)."""

    def __init__(self, into: int, out: int, bias: bool) -> None:
        self.weight = nnx.Param(jnp.empty((out, into), jnp.float32))
        self.bias = nnx.Param(jnp.empty(out, jnp.float32)) if bias else None
        self.float8: Recipe | None = None

    def __call__(self, x: Array, policy: Policy) -> Array:
        """X (…, in) → (…, out)."""
        bias = None if self.bias is None else self.bias[...]
        # A layer in FP8 is so under the run's own policy; `evaluate` may ask for another one.
        return linear(x, self.weight[...], bias, policy, self.float8 if policy.operand == BF16 else None)


def rope_tables(length: int, head_dim: int, theta: float) -> tuple[Array, Array]:
    """Cos and sin (S, E/2) of position · theta^(−2i/E) (Su et al. 2021), in FP64."""
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float64) / head_dim
    angle = jnp.arange(length, dtype=jnp.float64)[:, None] * theta**-exponent
    return jnp.cos(angle), jnp.sin(angle)


def positions(documents_BS: Array) -> Array:
    """Position of each token in its own document, from 0: (B, S), the number of tokens of it that came before."""
    return document_mask(documents_BS)[:, 0].sum(-1) - 1


def rope_at(rope_tables: tuple[Array, Array], places: Array | None, policy: Policy) -> Rope:
    """The tables in the stream dtype; of these positions (B, S) if they are given."""
    cos, sin = rope_tables if places is None else (table[places] for table in rope_tables)
    return Rope(cos.astype(policy.stream), sin.astype(policy.stream))


def rotate(x_BSHE: Array, rope: Rope) -> Array:
    """Rotate each pair (i, i + E/2) of a head by its position's angle, paired as in Hugging Face's Llama."""
    cos, sin = rope.cos[..., None, :], rope.sin[..., None, :]
    left, right = jnp.split(x_BSHE, 2, axis=-1)
    return jnp.concatenate((left * cos - right * sin, right * cos + left * sin), axis=-1)


def expand(x_BSKE: Array, heads: int) -> Array:
    """Give each query head its key-value head: (B, S, K, E) → (B, S, H, E), each KV head repeated in place."""
    return jnp.repeat(x_BSKE, heads // x_BSKE.shape[2], axis=2)


def swiglu(gate_BSF: Array, up_BSF: Array) -> Array:
    """silu(gate) ⊙ up."""
    return jax.nn.silu(gate_BSF) * up_BSF


class Attention(nnx.Module):
    """Causal grouped-query attention (Ainslie et al. 2023) with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        kv = config.kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden, config.hidden, config.qkv_bias)
        self.k_proj = Linear(config.hidden, kv, config.qkv_bias)
        self.v_proj = Linear(config.hidden, kv, config.qkv_bias)
        self.o_proj = Linear(config.hidden, config.hidden, config.o_bias)

    def __call__(self, x_BSD: Array, rope: Rope, policy: Policy, tap: Tap, name: str) -> Array:
        """X (B, S, D), already normed → (B, S, D)."""
        batch = x_BSD.shape[:2]
        q_BSD = tap(f"{name}.q", self.q_proj(tap(f"{name}.q.x", x_BSD), policy))
        k_BSD = tap(f"{name}.k", self.k_proj(tap(f"{name}.k.x", x_BSD), policy))
        v_BSD = tap(f"{name}.v", self.v_proj(tap(f"{name}.v.x", x_BSD), policy))
        q_BSHE = q_BSD.reshape(*batch, self.heads, self.head_dim)
        k_BSKE = k_BSD.reshape(*batch, self.kv_heads, self.head_dim)
        v_BSKE = v_BSD.reshape(*batch, self.kv_heads, self.head_dim)
        q_BSHE = tap(f"{name}.q_rope", rotate(q_BSHE, rope))
        k_BSKE = tap(f"{name}.k_rope", rotate(k_BSKE, rope))
        out_BSHE = attention(q_BSHE, expand(k_BSKE, self.heads), expand(v_BSKE, self.heads), policy, rope.mask)
        out_BSD = tap(f"{name}.out", out_BSHE.reshape(x_BSD.shape))
        return tap(f"{name}.o_proj", self.o_proj(out_BSD, policy))


class SwiGLU(nnx.Module):
    """W_down · (silu(W_gate·x) ⊙ W_up·x) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        self.gate_proj = Linear(config.hidden, config.ffn_hidden, config.mlp_bias)
        self.up_proj = Linear(config.hidden, config.ffn_hidden, config.mlp_bias)
        self.down_proj = Linear(config.ffn_hidden, config.hidden, config.mlp_bias)

    def __call__(self, x_BSD: Array, policy: Policy, tap: Tap, name: str) -> Array:
        """X (B, S, D), already normed → (B, S, D)."""
        gate_BSF = tap(f"{name}.gate", self.gate_proj(tap(f"{name}.gate.x", x_BSD), policy))
        up_BSF = tap(f"{name}.up", self.up_proj(tap(f"{name}.up.x", x_BSD), policy))
        act_BSF = tap(f"{name}.act", swiglu(gate_BSF, up_BSF))
        return tap(f"{name}.down_proj", self.down_proj(act_BSF, policy))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        self.attn_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = SwiGLU(config)

    def __call__(self, x_BSD: Array, rope: Rope, policy: Policy, tap: Tap, name: str) -> Array:
        """X (B, S, D) → (B, S, D)."""
        normed_BSD = tap(f"{name}.attn_norm", self.attn_norm(tap(f"{name}.attn_norm.x", x_BSD)))
        mixed_BSD = self.attn(normed_BSD, rope, policy, tap, f"{name}.attn")
        x_BSD = tap(f"{name}.attn_residual", tap(f"{name}.attn_residual.x", x_BSD) + mixed_BSD)
        normed_BSD = tap(f"{name}.mlp_norm", self.mlp_norm(tap(f"{name}.mlp_norm.x", x_BSD)))
        mixed_BSD = self.mlp(normed_BSD, policy, tap, f"{name}.mlp")
        return tap(f"{name}.mlp_residual", tap(f"{name}.mlp_residual.x", x_BSD) + mixed_BSD)


class Embedding(nnx.Module):
    """A table (V, D) and its look-up, in the stream dtype."""

    def __init__(self, vocab_size: int, hidden: int) -> None:
        self.weight = nnx.Param(jnp.empty((vocab_size, hidden), jnp.float32))

    def __call__(self, tokens_BS: Array) -> Array:
        """Tokens (B, S) → (B, S, D)."""
        return self.weight[...][tokens_BS]


class Head(nnx.Module):
    """The untied head's weight (V, D); a tied one uses the embedding's."""

    def __init__(self, vocab_size: int, hidden: int) -> None:
        self.weight = nnx.Param(jnp.empty((vocab_size, hidden), jnp.float32))


class Llama(nnx.Module):
    """Tokens (B, S) → logits (B, S, V) → negative log-likelihood of the targets (B, S)."""

    def __init__(self, run: RunConfig) -> None:
        config = run.model
        self.head_dim, self.theta, self.loss = config.head_dim, config.rope_theta, run.loss
        self.document_mask, self.reset_positions = run.attention.document_mask, run.attention.reset_positions
        self.embed = Embedding(config.vocab_size, config.hidden)
        self.blocks = nnx.List([Block(config) for _ in range(config.layers)])
        self.final_norm = RMSNorm(config.hidden, config.norm_eps)
        self.lm_head = None if config.tied else Head(config.vocab_size, config.hidden)
        in_fp8 = fp8_modules(run)
        for path, module in nnx.iter_modules(self):
            if isinstance(module, Linear) and ".".join(map(str, path)) in in_fp8:
                module.float8 = run.precision.fp8

    def places(self, length: int, documents_BS: Array | None, policy: Policy) -> Rope:
        """Positions and mask as the configuration asks; a sequence without documents is one document."""
        reset = None if documents_BS is None or not self.reset_positions else positions(documents_BS)
        mask = None if documents_BS is None or not self.document_mask else document_mask(documents_BS)
        return rope_at(rope_tables(length, self.head_dim, self.theta), reset, policy)._replace(mask=mask)

    def trunk(self, tokens_BS: Array, policy: Policy, tap: Tap = no_tap, documents_BS: Array | None = None) -> Array:
        """Everything before the head: tokens (B, S) → final-norm output (B, S, D)."""
        rope = self.places(tokens_BS.shape[1], documents_BS, policy)
        x_BSD = tap("embed", self.embed(tokens_BS))
        for i, block in enumerate(self.blocks):
            x_BSD = block(x_BSD, rope, policy, tap, f"blocks.{i}")
        return tap("final_norm", self.final_norm(x_BSD))

    @property
    def head_weight(self) -> Array:
        """The head's weight (V, D)."""
        weight: Array = (self.lm_head or self.embed).weight[...]
        return weight

    def logits(self, x_BSD: Array, policy: Policy, tap: Tap = no_tap) -> Array:
        """Final-norm output (B, S, D) → logits (B, S, V) in the stream dtype."""
        return head(x_BSD, tap("logits.weight", self.head_weight), policy)

    def __call__(
        self,
        tokens_BS: Array,
        targets_BS: Array,
        policy: Policy,
        tap: Tap = no_tap,
        documents_BS: Array | None = None,
    ) -> Array:
        """Per-token loss (B, S) in nats; `tap` sees every tensor of the chain on its way."""
        x_BSD = self.trunk(tokens_BS, policy, tap, documents_BS)
        if self.loss.of_library:
            weight_VD = tap("logits.weight", self.head_weight)
            return tap("nll", library_nll(x_BSD, weight_VD, targets_BS, policy, self.loss))
        logits_BSV = tap("logits", self.logits(x_BSD, policy, tap))
        return tap("nll", negative_log_likelihood(logits_BSV, targets_BS, self.loss.z_loss))
