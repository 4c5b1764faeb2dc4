"""Faults of the forward pass: a module of the model is swapped for one that is wrong."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_backend.model import Attention, Block, Embedding, Linear, Llama, RMSNorm, Rope, SwiGLU, Tap
from torch_backend.precision import Policy
from torch_backend.session import TorchBackend, TorchSession


def swap(model: Llama, right: type[nn.Module], wrong: type[nn.Module]) -> Llama:
    """The model with every module of class `right` turned into `wrong`, weights kept."""
    for module in model.modules():
        if type(module) is right:
            module.__class__ = wrong
    return model


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


class _TiledAttention(Attention):
    def expand(self, x_BSKE: Tensor) -> Tensor:
        return x_BSKE.repeat(1, 1, self.heads // self.kv_heads, 1)


class _TiledSession(TorchSession):
    def build_model(self) -> Llama:
        return swap(super().build_model(), Attention, _TiledAttention)


class KvHeadsTiled(TorchBackend):
    """KV heads laid out 0 1 0 1 instead of 0 0 1 1 (axlearn #842)."""

    session_class = _TiledSession


class _Bf16RopeAttention(Attention):
    def rotate(self, x_BSHE: Tensor, rope: Rope) -> Tensor:
        return super().rotate(x_BSHE, (bf16(rope[0]), bf16(rope[1])))


class _Bf16RopeSession(TorchSession):
    def build_model(self) -> Llama:
        return swap(super().build_model(), Attention, _Bf16RopeAttention)


class RopeInBf16(TorchBackend):
    """RoPE's cos and sin rounded to bf16 (transformers #29285)."""

    session_class = _Bf16RopeSession


class _Bf16Norm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        low = x.bfloat16()
        return (low * torch.rsqrt(low.square().mean(-1, keepdim=True) + self.eps) * self.weight.bfloat16()).to(x.dtype)


class _Bf16NormSession(TorchSession):
    def build_model(self) -> Llama:
        return swap(super().build_model(), RMSNorm, _Bf16Norm)


class RmsNormInBf16(TorchBackend):
    """RMSNorm computed in bf16."""

    session_class = _Bf16NormSession


class _EpsilonSession(TorchSession):
    def build_model(self) -> Llama:
        model = super().build_model()
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module.eps = 1e-6
        return model


class NormEpsilon(TorchBackend):
    """RMSNorm's epsilon 1e-6 where the configuration says 1e-5."""

    session_class = _EpsilonSession


class _Bf16Logits(Llama):
    def logits(self, x_BSD: Tensor, policy: Policy) -> Tensor:
        return bf16(super().logits(x_BSD, policy))


class _Bf16LogitsSession(TorchSession):
    def build_model(self) -> Llama:
        return swap(super().build_model(), Llama, _Bf16Logits)


class LogitsRoundedToBf16(TorchBackend):
    """Logits leave the head in bf16."""

    session_class = _Bf16LogitsSession


class _Bf16Embedding(Embedding):
    def forward(self, tokens_BS: Tensor) -> Tensor:
        return bf16(super().forward(tokens_BS))


class _Bf16EmbeddingSession(TorchSession):
    def build_model(self) -> Llama:
        return swap(super().build_model(), Embedding, _Bf16Embedding)


class EmbeddingInBf16(TorchBackend):
    """The embedding's rows enter the residual stream in bf16."""

    session_class = _Bf16EmbeddingSession


class _ScaledLinear(Linear):
    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        return super().forward(x, policy) * 1.001


class _ScaledQuerySession(TorchSession):
    def build_model(self) -> Llama:
        model = super().build_model()
        last = [m for m in model.modules() if isinstance(m, Attention)][-1]
        last.q_proj.__class__ = _ScaledLinear
        return model


class QueryScaled(TorchBackend):
    """Queries of the last block a thousandth too long."""

    session_class = _ScaledQuerySession


def _attention(attention: Attention, q: Tensor, k: Tensor, v: Tensor, policy: Policy, ahead: int, low: bool) -> Tensor:
    q, k, v = (
        x.to(policy.operand).to(policy.stream).transpose(1, 2) for x in (q, attention.expand(k), attention.expand(v))
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(attention.head_dim)
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(ahead)
    scores = scores.masked_fill(~allowed, -math.inf)
    weights = scores.bfloat16().softmax(-1) if low else scores.softmax(-1)
    out = (weights.to(policy.operand).to(policy.stream) @ v).to(policy.operand)
    return out.to(policy.stream).transpose(1, 2)


class _AheadAttention(Attention):
    def attend(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, policy: Policy) -> Tensor:
        return _attention(self, q_BSHE, k_BSKE, v_BSKE, policy, ahead=1, low=False)


class _AheadSession(TorchSession):
    def build_model(self) -> Llama:
        model = super().build_model()
        first = next(m for m in model.modules() if isinstance(m, Attention))
        first.__class__ = _AheadAttention
        return model


class SeesOneTokenAhead(TorchBackend):
    """The first block attends one token into the future."""

    session_class = _AheadSession


class _Bf16SoftmaxAttention(Attention):
    def attend(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, policy: Policy) -> Tensor:
        return _attention(self, q_BSHE, k_BSKE, v_BSKE, policy, ahead=0, low=True)


class _Bf16SoftmaxSession(TorchSession):
    def build_model(self) -> Llama:
        return swap(super().build_model(), Attention, _Bf16SoftmaxAttention)


class SoftmaxInBf16(TorchBackend):
    """Attention's softmax in bf16."""

    session_class = _Bf16SoftmaxSession


class _Bf16ResidualBlock(Block):
    def forward(self, x_BSD: Tensor, rope: Rope, policy: Policy, tap: Tap, name: str) -> Tensor:
        normed_BSD = tap(f"{name}.attn_norm", self.attn_norm(x_BSD))
        x_BSD = tap(f"{name}.attn_residual", bf16(x_BSD + self.attn(normed_BSD, rope, policy, tap, f"{name}.attn")))
        normed_BSD = tap(f"{name}.mlp_norm", self.mlp_norm(x_BSD))
        return tap(f"{name}.mlp_residual", bf16(x_BSD + self.mlp(normed_BSD, policy, tap, f"{name}.mlp")))


class _Bf16ResidualSession(TorchSession):
    def build_model(self) -> Llama:
        return swap(super().build_model(), Block, _Bf16ResidualBlock)


class ResidualInBf16(TorchBackend):
    """The residual stream kept in bf16."""

    session_class = _Bf16ResidualSession


class _GeluSwiGLU(SwiGLU):
    def activate(self, gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
        return F.gelu(gate_BSF) * up_BSF


class _GeluSession(TorchSession):
    def build_model(self) -> Llama:
        return swap(super().build_model(), SwiGLU, _GeluSwiGLU)


class GeluForSilu(TorchBackend):
    """GELU where SiLU belongs."""

    session_class = _GeluSession
