"""Faults as a compiler makes them: the eager program is right, the compiled one is wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from lockstep.parity_tests.faults.attention import causal, written_out
from lockstep.parity_tests.faults.planting import backward, bf16, swapped
from lockstep.torch_backend.attention import Mask
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.model import Attention, Embedding, RMSNorm, Rope, SwiGLU, Tap, Transformer, no_tap
from lockstep.torch_backend.precision import Policy, linear
from lockstep.torch_backend.session import TorchSession


class _RolledAttention(Attention):
    def attend(
        self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, policy: Policy, mask: Mask | None = None
    ) -> Tensor:
        if is_compiling():
            k_BSKE, v_BSKE = (backward(x, lambda grad: grad.roll(1, 1)) for x in (k_BSKE, v_BSKE))
        return super().attend(q_BSHE, k_BSKE, v_BSKE, policy, mask)


class CompiledKeyGradientsMisplaced(TorchBackend):
    """Compiled attention gives keys and values their neighbours' gradients (as pytorch #158212)."""

    session_class = swapped(Attention, _RolledAttention)


class _FastSwiGLU(SwiGLU):
    def activate(self, gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
        if not is_compiling():
            return super().activate(gate_BSF, up_BSF)
        return gate_BSF * bf16(gate_BSF.sigmoid()) * up_BSF


class CompiledSigmoidInBf16(TorchBackend):
    """The fused activation takes its exponential in bf16."""

    session_class = swapped(SwiGLU, _FastSwiGLU)


class _OutsideNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        if not is_compiling():
            return super().forward(x)
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class CompiledEpsilonOutsideTheRoot(TorchBackend):
    """The fused norm adds epsilon to the root instead of under it."""

    session_class = swapped(RMSNorm, _OutsideNorm)


class _StoredNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        normed = super().forward(x)
        return bf16(normed) if is_compiling() else normed


class CompiledNormStoredInBf16(TorchBackend):
    """The fused norm before SwiGLU leaves its output in bf16."""

    session_class = swapped(RMSNorm, _StoredNorm, "*.mlp_norm")


class _TiledMaskAttention(Attention):
    def attend(
        self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, policy: Policy, mask: Mask | None = None
    ) -> Tensor:
        if not is_compiling():
            return super().attend(q_BSHE, k_BSKE, v_BSKE, policy, mask)
        tile = torch.arange(q_BSHE.shape[1], device=q_BSHE.device) // 16
        allowed_SS = causal(q_BSHE) | (tile[:, None] == tile) & (tile[:, None] == tile[-1])
        return written_out(self, q_BSHE, k_BSKE, v_BSKE, policy, allowed_SS)


class CompiledLastTileUnmasked(TorchBackend):
    """Compiled attention does not mask inside its last tile: those queries see the future."""

    session_class = swapped(Attention, _TiledMaskAttention)


class _UncastHead(Transformer):
    def logits(self, x_BSD: Tensor, policy: Policy) -> Tensor:
        if not is_compiling():
            return super().logits(x_BSD, policy)
        return F.linear(x_BSD, self.tap("logits.weight", (self.lm_head or self.embed).weight))


class CompiledHeadDropsItsCasts(TorchBackend):
    """The compiler takes the casts of the head's operands out of its fusion."""

    session_class = swapped(Transformer, _UncastHead)


class _UnturnedAttention(Attention):
    def rotate(self, x_BSHE: Tensor, rope: Rope) -> Tensor:
        turned = super().rotate(x_BSHE, rope)
        if not is_compiling() or x_BSHE.shape[2] == self.heads:
            return turned
        tail = torch.arange(x_BSHE.shape[1], device=x_BSHE.device) >= x_BSHE.shape[1] - 4
        return torch.where(tail[:, None, None], x_BSHE, turned)


class CompiledTailUnrotated(TorchBackend):
    """Compiled RoPE leaves the keys of the last four positions as they are: a vector loop without its tail."""

    session_class = swapped(Attention, _UnturnedAttention)


class _Overwriting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        tokens, weight = ctx.saved_tensors
        flat = tokens.flatten()
        # For each token only its last position contributes, in whatever order the rows are written.
        later = (flat[:, None] == flat).triu(1).any(1)
        kept = grads[0].flatten(0, 1) * ~later[:, None]
        return None, torch.zeros_like(weight).index_add(0, flat, kept)


class _OverwritingEmbedding(Embedding):
    def forward(self, tokens_BS: Tensor) -> Tensor:
        if not is_compiling():
            return super().forward(tokens_BS)
        rows: Tensor = _Overwriting.apply(tokens_BS, self.weight)
        return rows


class CompiledScatterOverwrites(TorchBackend):
    """The compiled gradient of the look-up writes where it should add: of a token that occurs twice, one counts."""

    session_class = swapped(Embedding, _OverwritingEmbedding)


class _LowSumSession(TorchSession):
    def micro_loss(
        self, tokens: Tensor, targets: Tensor, weights: Tensor, total: Tensor, *documents: Tensor
    ) -> tuple[Tensor, Tensor]:
        loss, nll = super().micro_loss(tokens, targets, weights, total, *documents)
        if not is_compiling():
            return loss, nll
        return loss + (bf16(loss) - loss).detach(), nll


class CompiledLossInBf16(TorchBackend):
    """The compiled program gives its loss in bf16; gradients are right."""

    session_class = _LowSumSession


class _LongUntappedSwiGLU(SwiGLU):
    def forward(self, x_BSD: Tensor, policy: Policy, tap: Tap, name: str) -> Tensor:
        if not (is_compiling() and tap is no_tap):
            return super().forward(x_BSD, policy, tap, name)
        weight = backward(self.up_proj.weight, lambda grad: grad * 1.05)
        act_BSF = self.activate(self.gate_proj(x_BSD, policy), linear(x_BSD, weight, self.up_proj.bias, policy))
        return self.down_proj(act_BSF, policy)


class UntappedGradientLong(TorchBackend):
    """One gradient is a twentieth too long in the compiled program that trains; taps break the fusion that does it."""

    session_class = swapped(SwiGLU, _LongUntappedSwiGLU, "blocks.1.mlp")


class _BackwardsUntappedAttention(Attention):
    def forward(self, x_BSD: Tensor, rope: Rope, policy: Policy, tap: Tap, name: str) -> Tensor:
        if is_compiling() and tap is no_tap:
            rope = rope._replace(sin=-rope.sin)
        return super().forward(x_BSD, rope, policy, tap, name)


class UntappedRopeTurnsBack(TorchBackend):
    """The compiled program that trains rotates the other way; with taps in it, it does not."""

    session_class = swapped(Attention, _BackwardsUntappedAttention)


class _TwiceUntapped(Transformer):
    def forward(
        self, tokens_BS: Tensor, targets_BS: Tensor, policy: Policy, documents_BS: Tensor | None = None
    ) -> Tensor:
        if not (is_compiling() and self.tap is no_tap):
            return super().forward(tokens_BS, targets_BS, policy, documents_BS)
        logits_BSV = self.logits(self.trunk(tokens_BS, policy, no_tap, documents_BS), policy)
        return self.nll(backward(logits_BSV, lambda grad: grad * 2.0), targets_BS)


class UntappedGradientsDoubled(TorchBackend):
    """The compiled program that trains sends everything back twice; with taps in it, once."""

    session_class = swapped(Transformer, _TwiceUntapped)
