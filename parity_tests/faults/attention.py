"""Faults in the forward pass of attention: RoPE, masks, grouping of heads, softmax, rounding."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.core.backend import Batch
from lockstep.parity_tests.faults.planting import backward, bf16, in_model, rounded_down, swap, swapped
from lockstep.torch_backend.attention import Mask
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.model import Attention, Rope, Transformer
from lockstep.torch_backend.precision import Policy
from lockstep.torch_backend.session import TorchSession


class Bf16RopeAttention(Attention):
    """Attention whose RoPE tables (cos and sin) are rounded to bf16."""

    def rotate(self, x_BSHE: Tensor, rope: Rope) -> Tensor:
        return super().rotate(x_BSHE, rope._replace(cos=bf16(rope.cos), sin=bf16(rope.sin)))


class RopeInBf16(TorchBackend):
    """RoPE's cos and sin rounded to bf16 (transformers #29285)."""

    session_class = swapped(Attention, Bf16RopeAttention)


def _from_one(model: Transformer) -> None:
    length, head_dim, theta = model.rope
    model.rope = length + 1, head_dim, theta
    model.place_rope(model.cos.device)
    model.cos, model.sin = model.cos[1:], model.sin[1:]


class PositionsFromOne(TorchBackend):
    """RoPE counts positions from one: scores see only differences, so that nothing but q and k move."""

    session_class = in_model(_from_one)


class _InterleavedAttention(Attention):
    def rotate(self, x_BSHE: Tensor, rope: Rope) -> Tensor:
        if x_BSHE.shape[2] == self.heads:
            return super().rotate(x_BSHE, rope)
        order = torch.arange(self.head_dim, device=x_BSHE.device).unflatten(0, (2, -1)).T.flatten()
        return super().rotate(x_BSHE[..., order], rope)


class KeysPairedAsNeighbours(TorchBackend):
    """RoPE pairs a key's neighbours, as checkpoints of another layout need, and a query's halves."""

    session_class = swapped(Attention, _InterleavedAttention)


class _TiledAttention(Attention):
    def expand(self, x_BSKE: Tensor) -> Tensor:
        return x_BSKE.repeat(1, 1, self.heads // self.kv_heads, 1)


class KvHeadsTiled(TorchBackend):
    """KV heads laid out 0 1 0 1 instead of 0 0 1 1 (axlearn #842)."""

    session_class = swapped(Attention, _TiledAttention)


def written_out(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, policy: Policy, allowed_SS: Tensor, low: bool = False
) -> Tensor:
    """Compute attention from plain operations, under the mask `allowed_SS`, in the stream's dtype.

    low: compute the softmax in bf16.
    """
    q, k, v = (
        x.to(policy.operand).to(policy.stream).transpose(1, 2) for x in (q, attention.expand(k), attention.expand(v))
    )
    scores = (q @ k.transpose(-1, -2) / math.sqrt(attention.head_dim)).masked_fill(~allowed_SS, -math.inf)
    weights = scores.bfloat16().softmax(-1) if low else scores.softmax(-1)
    out = (weights.to(policy.operand).to(policy.stream) @ v).to(policy.operand)
    return out.to(policy.stream).transpose(1, 2)


def causal(q_BSHE: Tensor, ahead: int = 0) -> Tensor:
    """Return the causal mask (S, S), bool: True where the query of the row sees the key of the column.

    ahead: the number of later tokens that each query sees as well.
    """
    return torch.ones(q_BSHE.shape[1], q_BSHE.shape[1], dtype=torch.bool, device=q_BSHE.device).tril(ahead)


class _AheadAttention(Attention):
    def attend(
        self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, policy: Policy, mask: Mask | None = None
    ) -> Tensor:
        return written_out(self, q_BSHE, k_BSKE, v_BSKE, policy, causal(q_BSHE, ahead=1))


class SeesOneTokenAhead(TorchBackend):
    """The first block attends one token into the future."""

    session_class = in_model(lambda model: swap(model, Attention, _AheadAttention, "blocks.0.attn"))


class _Bf16SoftmaxAttention(Attention):
    def attend(
        self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, policy: Policy, mask: Mask | None = None
    ) -> Tensor:
        return written_out(self, q_BSHE, k_BSKE, v_BSKE, policy, causal(q_BSHE), low=True)


class SoftmaxInBf16(TorchBackend):
    """Attention's softmax in bf16."""

    session_class = swapped(Attention, _Bf16SoftmaxAttention)


class _FlatAttention(Attention):
    def attend(
        self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, policy: Policy, mask: Mask | None = None
    ) -> Tensor:
        return super().attend(q_BSHE / math.sqrt(self.heads), k_BSKE, v_BSKE, policy, mask)


class ScoresScaledByWidth(TorchBackend):
    """Scores divided by the root of the model's width instead of the head's."""

    session_class = swapped(Attention, _FlatAttention)


class _RoundingAttention(Attention):
    def attend(
        self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, policy: Policy, mask: Mask | None = None
    ) -> Tensor:
        q = bf16(q_BSHE).transpose(1, 2)
        k, v = (bf16(self.expand(x)).transpose(1, 2) for x in (k_BSKE, v_BSKE))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return rounded_down(backward(out, bf16), 16).transpose(1, 2)


class AttentionRoundsDown(TorchBackend):
    """Attention's output rounds toward −∞: an error of one sign, that training feeds on (arXiv 2510.04212)."""

    session_class = swapped(Attention, _RoundingAttention)


class _UnmaskedAttention(Attention):
    def attend(
        self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, policy: Policy, mask: Mask | None = None
    ) -> Tensor:
        return super().attend(q_BSHE, k_BSKE, v_BSKE, policy)


class PackedDocumentsSeeEachOther(TorchBackend):
    """Documents packed into one sequence see each other: the kernel is not given their mask (functionary #265)."""

    session_class = swapped(Attention, _UnmaskedAttention)


def _running_on(model: Transformer) -> None:
    model.reset_positions = False


class PositionsRunOn(TorchBackend):
    """Positions run on from one packed document into the next, where each should begin at zero."""

    session_class = in_model(_running_on)


class _EarlyBoundarySession(TorchSession):
    def documents(self, batch: Batch) -> tuple[Tensor, ...]:
        return tuple(torch.cat((given[:, 1:], given[:, -1:]), 1) for given in super().documents(batch))


class EndOfTextOpensTheNextDocument(TorchBackend):
    """The mask's boundary lies one token early: the end of text is seen by the next document, and not by its own."""

    session_class = _EarlyBoundarySession
