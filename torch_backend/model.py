"""Decoder-only transformers in PyTorch. Twin: jax_backend/model.py, line by line.

Suffixes name the axes of a tensor: B batch, S sequence, D hidden, H query heads, K key-value heads, E head dimension,
F feed-forward, V vocabulary. Tensors have the policy's stream dtype. Parameters have the canonical names of
core/model/names.py. FP8, loss heads and recomputation are applied from outside: torch_backend/kernels/__init__.py.
Casts are in torch_backend/precision.py and in `Attention.attend`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.core.config.schema import ModelConfig, RunConfig
from lockstep.core.model.families import traits_of
from lockstep.core.model.families.transformer import UNCAPPED, has_window
from lockstep.torch_backend.attention import Kernel, Mask
from lockstep.torch_backend.kernels.embedding import embedding
from lockstep.torch_backend.kernels.float8 import Float8
from lockstep.torch_backend.kernels.layer_norm import layer_norm
from lockstep.torch_backend.kernels.recompute_products import gated, rms_norm
from lockstep.torch_backend.kernels.rotary import rotated
from lockstep.torch_backend.loss import negative_log_likelihood, weighted_mean
from lockstep.torch_backend.precision import DTYPES, Policy, head, linear

Tap = Callable[[str, Tensor], Tensor]
Stretch = Callable[[Tensor], Tensor]
# (x (B, S, D), weight (V, D), targets (B, S), weights (B, S), total, policy, tap) → loss, per-token losses (B, S)
FusedLoss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Policy, Tap], tuple[Tensor, Tensor]]


class Rope(NamedTuple):
    """Position-dependent inputs, the same for every block.

    cos, sin: (S, E/2), or (B, S, E/2) if positions restart in each document; E is 0 in a model without RoPE. mask: the
    attention mask, or None for a causal mask. window: the mask of blocks with a sliding window. places: positions, (S,)
    or (B, S), in a model with learned positions; else None.
    """

    cos: Tensor
    sin: Tensor
    mask: Mask | None = None
    window: Mask | None = None
    places: Tensor | None = None


def no_tap(name: str, value: Tensor) -> Tensor:
    """Return the value unchanged: the tap of a training step."""
    return value


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · gain."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (…, D) → (…, D)."""
        return rms_norm(x, self.weight, self.eps)


class CenteredNorm(RMSNorm):
    """x / √(mean(x²) + eps) · (1 + w)."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (…, D) → (…, D)."""
        return rms_norm(x, 1 + self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x − mean(x)) / √(var(x) + eps) · gain + bias (Ba et al. 2016)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (…, D) → (…, D)."""
        return layer_norm(x, self.weight, self.bias, self.eps)


class HeadNorm(nn.Module):
    """RMSNorm of each head separately, with one gain (E,) for all heads (Henry et al. 2020)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each head of x (B, S, H, E) → (B, S, H, E)."""
        return rms_norm(x, self.weight, self.eps)


NORMS = {"norm": RMSNorm, "centered_norm": CenteredNorm, "layer_norm": LayerNorm}


class Linear(nn.Module):
    """x · Wᵀ + b with the policy's casts; W is (out, in).

    float8: the FP8 recipe of the product; None: the product has the policy's operand dtype.
    """

    def __init__(self, into: int, out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((out, into)))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None
        self.float8: Float8 | None = None

    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        """Project x (…, in) → (…, out)."""
        return linear(x, self.weight, self.bias, policy, self.float8)


def rope_tables(
    length: int, head_dim: int, theta: float, angles: torch.dtype = torch.float64, stretch: Stretch | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin (S, E/2), FP64, of position · theta^(−2i/E) (Su et al. 2021).

    angles: dtype of frequencies and angles. stretch: function of the frequencies, in radians per token, or None.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequency = theta**-exponent
    angle = torch.arange(length, dtype=angles)[:, None] * (frequency if stretch is None else stretch(frequency)).to(
        angles
    )
    return torch.cos(angle.double()), torch.sin(angle.double())


def stretch_of(config: ModelConfig) -> tuple[Stretch, ...]:
    """Return the function that scales RoPE frequencies as in Llama 3.1 (Grattafiori et al. 2024); () if none is needed.

    A frequency above `rope_high` turns per `rope_original` tokens stays. One below `rope_low` turns is divided by
    `rope_factor`. Between them, the result is a linear interpolation.
    """

    def stretched(frequencies: Tensor) -> Tensor:
        turns = config.rope_original * frequencies / (2 * math.pi)
        stays = ((turns - config.rope_low) / (config.rope_high - config.rope_low)).clamp(0, 1)
        return frequencies * (stays + (1 - stays) / config.rope_factor)

    return () if config.rope_factor == 1 else (stretched,)


def positions(documents_BS: Tensor) -> Tensor:
    """Return the position of each token in its own document, from 0: (B, S)."""
    # The position is the distance from the first token of the document.
    place_BS = torch.arange(documents_BS.shape[1], device=documents_BS.device).expand_as(documents_BS)
    begins_BS = F.pad(documents_BS.diff(dim=1) != 0, (1, 0))
    return place_BS - torch.where(begins_BS, place_BS, 0).cummax(1).values


def rope_at(rope_tables: tuple[Tensor, Tensor], places: Tensor | None, policy: Policy) -> Rope:
    """Return the tables in the dtype of the policy; with `places` (B, S), the rows of these positions."""
    cos, sin = rope_tables if places is None else (table[places] for table in rope_tables)
    return Rope(*policy.tables(cos, sin))


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023), with rotary positions if the family has them."""

    def __init__(self, run: RunConfig, layer: int = 0) -> None:
        super().__init__()
        config, traits = run.model, traits_of(run.model)
        self.grouped = run.attention.grouped == "kernel"
        self.kernel = Kernel.of(run)
        self.rotary, self.windowed = traits.rotary, has_window(traits, config, layer)
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        wide, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        qkv_bias = traits.biased(config, "qkv_bias")
        self.q_proj = Linear(config.hidden, wide, qkv_bias)
        self.k_proj = Linear(config.hidden, kv, qkv_bias)
        self.v_proj = Linear(config.hidden, kv, qkv_bias)
        self.q_norm = HeadNorm(config.head_dim, config.norm_eps) if traits.head_norms else None
        self.k_norm = HeadNorm(config.head_dim, config.norm_eps) if traits.head_norms else None
        self.o_proj = Linear(wide, config.hidden, traits.biased(config, "o_bias"))

    def rotate(self, x_BSHE: Tensor, rope: Rope) -> Tensor:
        """Rotate each pair (i, i + E/2) of a head by its position's angle, paired as in Hugging Face's Llama."""
        return rotated(x_BSHE, rope.cos[..., None, :], rope.sin[..., None, :])

    def expand(self, x_BSKE: Tensor) -> Tensor:
        """Repeat each key-value head for the query heads of its group: (B, S, K, E) → (B, S, H, E)."""
        return torch.repeat_interleave(x_BSKE, self.heads // self.kv_heads, dim=2)

    def attend(
        self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, policy: Policy, mask: Mask | None = None
    ) -> Tensor:
        """Return softmax(q·kᵀ·scale + mask)·v, (B, S, H, E), operands and output rounded to the operand dtype."""
        # Repeat keys and values in the stream dtype: the gradients of query heads that share one are summed in it.
        k_BSKE, v_BSKE = policy.read(k_BSKE, "rotation"), policy.read(v_BSKE, "linear")
        if not self.grouped:
            k_BSKE, v_BSKE = self.expand(k_BSKE), self.expand(v_BSKE)
        q, k, v = (x.to(policy.operand).transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE))
        return self.kernel(q, k, v, mask).transpose(1, 2).to(policy.stream)

    def placed(self, x_BSHE: Tensor, norm: HeadNorm | None, rope: Rope, policy: Policy, tap: Tap, name: str) -> Tensor:
        """Apply the family's norm and rotation to the queries or keys of each head, (B, S, H, E)."""
        if norm is not None:
            x_BSHE = tap(f"{name}_norm", policy.kept(norm(policy.read(x_BSHE, "linear")), "norm"))
        if self.rotary:
            x_BSHE = tap(f"{name}_rope", policy.rotated(lambda x: self.rotate(x, rope), x_BSHE))
        return x_BSHE

    def forward(self, x_BSD: Tensor, rope: Rope, policy: Policy, tap: Tap, name: str) -> Tensor:
        """Map the normalised x (B, S, D) → attention's output (B, S, D)."""
        q_BSD = tap(f"{name}.q", self.q_proj(tap(f"{name}.q.x", x_BSD), policy))
        k_BSD = tap(f"{name}.k", self.k_proj(tap(f"{name}.k.x", x_BSD), policy))
        v_BSD = tap(f"{name}.v", self.v_proj(tap(f"{name}.v.x", x_BSD), policy))
        q_BSHE = q_BSD.reshape(*q_BSD.shape[:2], self.heads, self.head_dim)
        k_BSKE = k_BSD.reshape(*k_BSD.shape[:2], self.kv_heads, self.head_dim)
        v_BSKE = v_BSD.reshape(*v_BSD.shape[:2], self.kv_heads, self.head_dim)
        q_BSHE = self.placed(q_BSHE, self.q_norm, rope, policy, tap, f"{name}.q")
        k_BSKE = self.placed(k_BSKE, self.k_norm, rope, policy, tap, f"{name}.k")
        seen = rope.window if self.windowed else rope.mask
        # A candidate's own `attend` (docs/guide/candidates.md) may lack the argument `mask` if the run has no mask.
        mask = () if seen is None else (seen,)
        out_BSHE = self.attend(q_BSHE, k_BSKE, v_BSKE, policy, *mask)
        out_BSD = tap(f"{name}.out", out_BSHE.reshape(q_BSD.shape))
        return tap(f"{name}.o_proj", self.o_proj(out_BSD, policy))


class SwiGLU(nn.Module):
    """W_down · (silu(W_gate·x) ⊙ W_up·x) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, bias: bool) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden, config.ffn_hidden, bias)
        self.up_proj = Linear(config.hidden, config.ffn_hidden, bias)
        self.down_proj = Linear(config.ffn_hidden, config.hidden, bias)

    def activate(self, gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
        """Return silu(gate) ⊙ up."""
        return gated(gate_BSF, up_BSF)

    def forward(self, x_BSD: Tensor, policy: Policy, tap: Tap, name: str) -> Tensor:
        """Map x (B, S, D), already normed → (B, S, D)."""
        gate_BSF = tap(f"{name}.gate", self.gate_proj(tap(f"{name}.gate.x", x_BSD), policy))
        up_BSF = tap(f"{name}.up", self.up_proj(tap(f"{name}.up.x", x_BSD), policy))
        act_BSF = tap(f"{name}.act", policy.activated(self.activate, gate_BSF, up_BSF))
        return tap(f"{name}.down_proj", self.down_proj(act_BSF, policy))


class GeGLU(SwiGLU):
    """W_down · (gelu(W_gate·x) ⊙ W_up·x) (Shazeer 2020), GELU by tanh."""

    def activate(self, gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
        """Return gelu(gate) ⊙ up."""
        return F.gelu(gate_BSF, approximate="tanh") * up_BSF


class MLP(nn.Module):
    """W_down · gelu(W_up·x), GELU by tanh (Hendrycks & Gimpel 2016)."""

    def __init__(self, config: ModelConfig, bias: bool) -> None:
        super().__init__()
        self.up_proj = Linear(config.hidden, config.ffn_hidden, bias)
        self.down_proj = Linear(config.ffn_hidden, config.hidden, bias)

    def activate(self, up_BSF: Tensor) -> Tensor:
        """Return gelu(up)."""
        return F.gelu(up_BSF, approximate="tanh")

    def forward(self, x_BSD: Tensor, policy: Policy, tap: Tap, name: str) -> Tensor:
        """Map x (B, S, D), already normed → (B, S, D)."""
        up_BSF = tap(f"{name}.up", self.up_proj(x_BSD, policy))
        act_BSF = tap(f"{name}.act", policy.activated(self.activate, up_BSF))
        return tap(f"{name}.down_proj", self.down_proj(act_BSF, policy))


MLPS: dict[str, Callable[[ModelConfig, bool], SwiGLU | MLP]] = {"gated": SwiGLU, "gated_gelu": GeGLU, "gelu": MLP}


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)); some families also normalise what attention and MLP add."""

    def __init__(self, run: RunConfig, layer: int = 0) -> None:
        super().__init__()
        config, traits = run.model, traits_of(run.model)
        norm = NORMS[traits.norm]
        self.attn_norm = norm(config.hidden, config.norm_eps)
        self.attn = Attention(run, layer)
        self.attn_post_norm = norm(config.hidden, config.norm_eps) if traits.post_norms else None
        self.mlp_norm = norm(config.hidden, config.norm_eps)
        self.mlp = MLPS[traits.activation](config, traits.biased(config, "mlp_bias"))
        self.mlp_post_norm = norm(config.hidden, config.norm_eps) if traits.post_norms else None

    def normed(self, norm: nn.Module | None, x_BSD: Tensor, policy: Policy, tap: Tap, name: str) -> Tensor:
        """Apply the family's post-norm, if any, to the output of attention or MLP: (B, S, D) in the stream dtype."""
        x_BSD = policy.read(x_BSD, "linear")
        return x_BSD if norm is None else policy.read(tap(name, policy.kept(norm(x_BSD), "norm")), "norm")

    def forward(self, x_BSD: Tensor, rope: Rope, policy: Policy, tap: Tap, name: str) -> Tensor:
        """Map x (B, S, D) → (B, S, D)."""
        normed_BSD = self.attn_norm(policy.read(tap(f"{name}.attn_norm.x", x_BSD), "residual"))
        normed_BSD = tap(f"{name}.attn_norm", policy.kept(normed_BSD, "norm"))
        mixed_BSD = self.attn(normed_BSD, rope, policy, tap, f"{name}.attn")
        mixed_BSD = self.normed(self.attn_post_norm, mixed_BSD, policy, tap, f"{name}.attn_post_norm")
        sum_BSD = tap(f"{name}.attn_residual.x", x_BSD) + mixed_BSD
        x_BSD = tap(f"{name}.attn_residual", policy.kept(sum_BSD, "residual"))
        normed_BSD = self.mlp_norm(policy.read(tap(f"{name}.mlp_norm.x", x_BSD), "residual"))
        normed_BSD = tap(f"{name}.mlp_norm", policy.kept(normed_BSD, "norm"))
        mixed_BSD = self.mlp(normed_BSD, policy, tap, f"{name}.mlp")
        mixed_BSD = self.normed(self.mlp_post_norm, mixed_BSD, policy, tap, f"{name}.mlp_post_norm")
        sum_BSD = tap(f"{name}.mlp_residual.x", x_BSD) + mixed_BSD
        return tap(f"{name}.mlp_residual", policy.kept(sum_BSD, "residual"))


class Embedding(nn.Module):
    """A table (V, D) of embeddings in the stream dtype, and its look-up."""

    def __init__(self, vocab_size: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((vocab_size, hidden)))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Map tokens (B, S) to (B, S, D)."""
        return embedding(tokens_BS, self.weight)


class Positions(nn.Module):
    """A table of learned positions (P, D)."""

    def __init__(self, rows: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((rows, hidden)))

    def forward(self, x_BSD: Tensor, places: Tensor) -> Tensor:
        """Add the rows of `places`, (S,) or (B, S), to x (B, S, D)."""
        return x_BSD + F.embedding(places, self.weight)


class HeadWeight(nn.Module):
    """The weight (V, D) of an untied head; a tied head uses the embedding's weight."""

    def __init__(self, vocab_size: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((vocab_size, hidden)))


class Transformer(nn.Module):
    """Tokens (B, S) → logits (B, S, V) → negative log-likelihood of the targets (B, S).

    tap: function that receives every tap's tensor and returns the tensor to continue with. fused_loss: loss head that
    computes the loss from hidden states; None computes it from whole logits.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, run: RunConfig) -> None:
        super().__init__()
        config, traits = run.model, traits_of(run.model)
        self.tap: Tap = no_tap
        self.fused_loss: FusedLoss | None = None
        self.z_loss = run.loss.z_loss
        self.document_mask, self.reset_positions = run.attention.document_mask, run.attention.reset_positions
        self.kernel = Kernel.of(run)
        self.angles, self.stretch = DTYPES[run.precision.plan.angles], stretch_of(config)
        self.rope = run.train.longest, config.head_dim if traits.rotary else 0, config.rope_theta
        self.rotary, self.window, self.logits_cap = traits.rotary, config.window, config.logits_cap
        self.embed_scale = math.sqrt(config.hidden) if traits.scaled_embedding else 1.0
        self.place_rope(torch.get_default_device())
        self.embed = Embedding(config.vocab_size, config.hidden)
        self.position = None if traits.rotary else Positions(config.positions, config.hidden)
        self.blocks = nn.ModuleList(Block(run, layer) for layer in range(config.layers))
        self.final_norm = NORMS[traits.norm](config.hidden, config.norm_eps)
        self.lm_head = None if config.tied else HeadWeight(config.vocab_size, config.hidden)

    def place_rope(self, device: torch.device) -> None:
        """Create the RoPE tables on a device: FP64 buffers that are not part of the state."""
        cos, sin = rope_tables(*self.rope, self.angles, *self.stretch)
        self.register_buffer("cos", cos.to(device), persistent=False)
        self.register_buffer("sin", sin.to(device), persistent=False)

    def rope_of(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin (S, E/2) of the first `length` positions, in FP64."""
        return self.cos[:length], self.sin[:length]

    def places(self, length: int, documents_BS: Tensor | None, policy: Policy, start: int = 0) -> Rope:
        """Return positions and masks for the run's settings; a sequence without documents is one document.

        start: position of the first query; earlier positions are only keys (a key-value cache).
        """
        reset = None if documents_BS is None or not self.reset_positions else positions(documents_BS)
        apart = documents_BS if self.document_mask else None
        cos, sin = (table[start:] for table in self.rope_of(length))
        rope = rope_at((cos, sin), reset, policy)._replace(mask=None if apart is None else self.kernel.mask(apart))
        if self.window:
            rope = rope._replace(window=self.kernel.window(apart, self.window, start, length, cos.device))
        if self.position is None:
            return rope
        return rope._replace(places=torch.arange(start, length, device=cos.device) if reset is None else reset)

    def trunk(self, tokens_BS: Tensor, policy: Policy, tap: Tap = no_tap, documents_BS: Tensor | None = None) -> Tensor:
        """Compute everything before the head: tokens (B, S) → final-norm output (B, S, D)."""
        return self.trunk_at(tokens_BS, self.places(tokens_BS.shape[1], documents_BS, policy), policy, tap)

    def trunk_at(self, tokens_BS: Tensor, rope: Rope, policy: Policy, tap: Tap = no_tap) -> Tensor:
        """Run the trunk on tokens with given positions and masks."""
        x_BSD = tap("embed", policy.kept(self.embed(tokens_BS), "residual"))
        if self.embed_scale != 1:
            x_BSD = tap("embed_scale", policy.kept(policy.read(x_BSD, "residual") * self.embed_scale, "residual"))
        if self.position is not None and rope.places is not None:
            x_BSD = self.position(policy.read(x_BSD, "residual"), rope.places)
            x_BSD = tap("position", policy.kept(x_BSD, "residual"))
        for i, block in enumerate(self.blocks):
            # Without taps, all blocks have the same name, so that blocks compiled one by one share one program.
            x_BSD = block(x_BSD, rope, policy, tap, "" if tap is no_tap else f"blocks.{i}")
        return tap("final_norm", policy.kept(self.final_norm(policy.read(x_BSD, "residual")), "norm"))

    @property
    def head_weight(self) -> Tensor:
        """The head's weight (V, D)."""
        weight: Tensor = (self.lm_head or self.embed).weight
        return weight

    def logits(self, x_BSD: Tensor, policy: Policy) -> Tensor:
        """Map the final norm's output (B, S, D) → logits (B, S, V) in the dtype of the policy's plan of casts."""
        return head(x_BSD, self.tap("logits.weight", self.head_weight), policy)

    def cap(self, logits_BSV: Tensor) -> Tensor:
        """Return cap · tanh(logits / cap) if the model has a cap, else the logits unchanged: (B, S, V)."""
        return self.logits_cap * torch.tanh(logits_BSV / self.logits_cap) if self.logits_cap else logits_BSV

    def nll(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        """Return logsumexp(logits) − the target's logit, plus z-loss, (B, S), in the logits' dtype, FP32 or wider."""
        return negative_log_likelihood(logits_BSV, targets_BS, self.z_loss)

    def forward(
        self, tokens_BS: Tensor, targets_BS: Tensor, policy: Policy, documents_BS: Tensor | None = None
    ) -> Tensor:
        """Return per-token loss (B, S) in nats, computed from whole logits."""
        x_BSD = self.trunk(tokens_BS, policy, self.tap, documents_BS)
        logits_BSV = self.tap(UNCAPPED if self.logits_cap else "logits", self.logits(x_BSD, policy))
        if self.logits_cap:
            logits_BSV = self.tap("logits", self.cap(logits_BSV))
        return self.tap("nll", self.nll(logits_BSV, targets_BS))

    def loss(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor,
        weights_BS: Tensor,
        total: Tensor,
        policy: Policy,
        *documents_BS: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return Σ weight·loss / total, a float64 scalar, and per-token losses (B, S), by the run's loss head."""
        if self.fused_loss is None:
            nll_BS = self(tokens_BS, targets_BS, policy, *documents_BS)
            return weighted_mean(nll_BS, weights_BS, total), nll_BS
        x_BSD = self.trunk(tokens_BS, policy, self.tap, *documents_BS)
        weight_VD = self.tap("logits.weight", self.head_weight)
        return self.fused_loss(x_BSD, weight_VD, targets_BS, weights_BS, total, policy, self.tap)


# The former name of the class, which candidates of users may import.
Llama = Transformer
