"""Faults in the backward pass alone: every forward value is right, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.parity_tests.faults.forward import _SummingBlock
from lockstep.parity_tests.faults.planting import backward, bf16, swapped
from lockstep.torch_backend.attention import Mask
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.model import Attention, Block, Embedding, Linear, RMSNorm, Rope, SwiGLU, Transformer
from lockstep.torch_backend.precision import Policy, head, linear
from lockstep.torch_backend.session import TorchSession


class _ScaledLossSession(TorchSession):
    def micro_loss(
        self, tokens: Tensor, targets: Tensor, weights: Tensor, total: Tensor, *documents: Tensor
    ) -> tuple[Tensor, Tensor]:
        loss, nll = super().micro_loss(tokens, targets, weights, total, *documents)
        return backward(loss, lambda grad: grad * 2.0**16), nll


class LossScaleNeverTakenOut(TorchBackend):
    """Gradients keep a loss scale of 2¹⁶; clipping and Adam hide it (as Lightning #9330)."""

    session_class = _ScaledLossSession


class _UniformNll(Transformer):
    def nll(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        nll_BS = super().nll(logits_BSV, targets_BS)
        return backward(nll_BS, lambda grad: torch.where(grad == 0, grad, grad.sum() / (grad != 0).sum()))


class NllGradientUnweighted(TorchBackend):
    """The gradient of the logits takes every weighted token alike; the loss does not (Liger #1298)."""

    session_class = swapped(Transformer, _UniformNll)


class _ZeroNll(Transformer):
    def nll(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        return super().nll(backward(logits_BSV, torch.zeros_like), targets_BS)


class LogitsGradientZero(TorchBackend):
    """The gradient of the logits is zero, the loss right (Megatron #1750)."""

    session_class = swapped(Transformer, _ZeroNll)


class _SummedInBf16(torch.autograd.Function):
    """The identity of logits, which also gives the head's weight a gradient, summed in bf16 over eight chunks."""

    @staticmethod
    def forward(ctx: Any, logits_BSV: Tensor, x_BSD: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(x_BSD)
        ctx.shape = weight_VD.shape
        return logits_BSV.view_as(logits_BSV)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        (x,) = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        total = torch.zeros(ctx.shape, dtype=torch.bfloat16, device=grad.device)
        for part, rows in zip(grad.flatten(0, -2).chunk(8), x.flatten(0, -2).chunk(8), strict=True):
            total = total + torch.mm(part.T, rows).bfloat16()
        return grads[0], None, total.to(grads[0].dtype)


class _ChunkedHeadModel(Transformer):
    def logits(self, x_BSD: Tensor, policy: Policy) -> Tensor:
        weight = self.tap("logits.weight", (self.lm_head or self.embed).weight)
        logits = head(x_BSD, weight.detach(), policy)
        summed: Tensor = _SummedInBf16.apply(logits, x_BSD.detach().to(policy.operand), weight)
        return summed


class HeadGradientSummedInBf16(TorchBackend):
    """The head's weight gradient is summed in bf16 over chunks of tokens (Liger #1391)."""

    session_class = swapped(Transformer, _ChunkedHeadModel)


class _CachedWeight(Linear):
    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        with torch.no_grad():
            cached = self.weight.to(policy.operand)
        return linear(x, cached, None, policy).to(policy.stream)


class WeightCastCachedWithoutGradient(TorchBackend):
    """The cast weight of one layer was cached under no_grad, as autocast's cache once was (pytorch #112583)."""

    session_class = swapped(Linear, _CachedWeight, "blocks.1.mlp.up_proj")


class _HalfHead(Transformer):
    def logits(self, x_BSD: Tensor, policy: Policy) -> Tensor:
        weight = self.tap("logits.weight", (self.lm_head or self.embed).weight).detach()
        return head(x_BSD, weight, policy)


class HeadWithoutGradient(TorchBackend):
    """The head gives its weight no gradient: with a tied head the embedding's lacks a half (verl #7835)."""

    session_class = swapped(Transformer, _HalfHead)


class _UntrainedNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight.detach()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * gain


class FinalGainFrozen(TorchBackend):
    """The final norm's gain gets no gradient, and stays at one for ever."""

    session_class = swapped(RMSNorm, _UntrainedNorm, "final_norm")


class _ConstantScaleNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps).detach() * self.weight


class NormScaleHeldConstant(TorchBackend):
    """The backward of SwiGLU's norms forgets that the scale depends on the input."""

    session_class = swapped(RMSNorm, _ConstantScaleNorm, "*.mlp_norm")


class _Bf16Gain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, gain = ctx.saved_tensors
        total = torch.zeros_like(gain, dtype=torch.bfloat16)
        for rows in (grads[0] * x).flatten(0, -2).chunk(16):
            total = total + rows.sum(0).bfloat16()
        return grads[0] * gain, total.to(gain.dtype)


class _Bf16GainNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = _Bf16Gain.apply(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps), self.weight)
        return normed


class GainGradientSummedInBf16(TorchBackend):
    """The gain's gradient of attention's norms is summed over tokens in bf16."""

    session_class = swapped(RMSNorm, _Bf16GainNorm, "*.attn_norm")


class _Bf16Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        share = bf16(gate.sigmoid())
        return grads[0] * up * share * (1 + gate * (1 - share)), grads[0] * gate * share


class RecomputingSwiGLU(SwiGLU):
    """SwiGLU whose backward pass recomputes the activation in bf16."""

    def activate(self, gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
        act_BSF: Tensor = _Bf16Activation.apply(gate_BSF, up_BSF)
        return act_BSF


class ActivationRecomputedInBf16(TorchBackend):
    """SwiGLU's backward recomputes the activation in bf16, unlike the forward (as pytorch #190758)."""

    session_class = swapped(SwiGLU, RecomputingSwiGLU)


class _TailLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, policy: Policy) -> Tensor:
        low, low_weight = x.to(policy.operand), weight.to(policy.operand)
        ctx.save_for_backward(low, low_weight)
        ctx.stream = policy.stream
        return linear(x, weight, None, policy).to(policy.stream)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        kept = torch.mm(grad[:-1].flatten(0, -2).T, x[:-1].flatten(0, -2))
        return torch.matmul(grad, weight).to(ctx.stream), kept.to(ctx.stream), None


class _TailLinearModule(Linear):
    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        y: Tensor = _TailLinear.apply(x, self.weight, policy)
        return y


class WeightGradientDropsTheTail(TorchBackend):
    """The weight gradient of SwiGLU's last projection leaves out the last rows of a micro-batch."""

    session_class = swapped(Linear, _TailLinearModule, "*.down_proj")


class _TruncatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, policy: Policy) -> Tensor:
        low, low_weight = x.to(policy.operand), weight.to(policy.operand)
        ctx.save_for_backward(low, low_weight)
        ctx.stream = policy.stream
        return linear(x, weight, None, policy).to(policy.stream)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        wide = torch.mm(grad.flatten(0, -2).float().T, x.flatten(0, -2).float())
        cut = (wide.view(torch.int32) & -0x10000).view(torch.float32)
        return torch.matmul(grad, weight).to(ctx.stream), cut.to(ctx.stream), None


class _TruncatedLinearModule(Linear):
    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        y: Tensor = _TruncatedLinear.apply(x, self.weight, policy)
        return y


class WeightGradientTruncated(TorchBackend):
    """The weight gradient of SwiGLU's gate is cut off to bf16 instead of rounded."""

    session_class = swapped(Linear, _TruncatedLinearModule, "*.gate_proj")


class _LongGradientLinear(Linear):
    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        return linear(x, backward(self.weight, lambda grad: grad * 1.01), self.bias, policy)


class QueryWeightGradientLong(TorchBackend):
    """The second block's query projection makes a weight gradient a hundredth too long."""

    session_class = swapped(Linear, _LongGradientLinear, "blocks.1.attn.q_proj")


class _HardlyShortGradientLinear(Linear):
    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        return linear(x, backward(self.weight, lambda grad: grad * 0.9993), self.bias, policy)


class UpWeightGradientHardlyShort(TorchBackend):
    """The second block's `up` projection makes a weight gradient 7 in 10,000 too short: less than one step's bound."""

    session_class = swapped(Linear, _HardlyShortGradientLinear, "blocks.1.mlp.up_proj")


class _CutLinear(Linear):
    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        return super().forward(x.detach(), policy)


class ValueInputGradientLost(TorchBackend):
    """The second block's values send no gradient back to the stream."""

    session_class = swapped(Linear, _CutLinear, "blocks.1.attn.v_proj")


class _FlushingLinear(Linear):
    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        least = 2.0**-24
        return super().forward(backward(x, lambda grad: torch.where(grad.abs() < least, 0.0, grad)), policy)


class SmallGradientsFlushed(TorchBackend):
    """The gradient that the output projection sends back is flushed to zero below 2⁻²⁴, the least FP16 number."""

    session_class = swapped(Linear, _FlushingLinear, "*.o_proj")


class _TileAttention(Attention):
    def attend(
        self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, policy: Policy, mask: Mask | None = None
    ) -> Tensor:
        kept = torch.arange(q_BSHE.shape[1], device=q_BSHE.device) < q_BSHE.shape[1] - 16
        return super().attend(
            backward(q_BSHE, lambda grad: grad * kept[None, :, None, None]), k_BSKE, v_BSKE, policy, mask
        )


class QueryGradientLosesLastTile(TorchBackend):
    """Attention's backward does not write the queries' gradient of its last tile (as TE #3216)."""

    session_class = swapped(Attention, _TileAttention)


class _OneHeadAttention(Attention):
    def expand(self, x_BSKE: Tensor) -> Tensor:
        first = torch.arange(self.heads, device=x_BSKE.device) % (self.heads // self.kv_heads) == 0
        return backward(super().expand(x_BSKE), lambda grad: grad * first[:, None])


class GroupGradientOfOneHead(TorchBackend):
    """Keys and values get the gradient of one query head of their group, not the group's sum."""

    session_class = swapped(Attention, _OneHeadAttention)


class _Turn(torch.autograd.Function):
    """RoPE whose backward pass rotates gradients by the same angle as the forward pass, not by its negative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _Turn.turned(x, cos, sin)

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Turn.turned(grads[0], cos, sin), None, None


class _TurningAttention(Attention):
    def rotate(self, x_BSHE: Tensor, rope: Rope) -> Tensor:
        turned: Tensor = _Turn.apply(x_BSHE, rope.cos[..., None, :], rope.sin[..., None, :])
        return turned


class RopeNotTurnedBack(TorchBackend):
    """RoPE's backward rotates forward, its transpose forgotten."""

    session_class = swapped(Attention, _TurningAttention)


class _ShortSkipBlock(_SummingBlock):
    def attn_sum(self, x_BSD: Tensor, mixed_BSD: Tensor) -> Tensor:
        return backward(x_BSD, lambda grad: grad * 0.999) + mixed_BSD


class SkipGradientShort(TorchBackend):
    """The gradient around the second block's attention is a thousandth too short."""

    session_class = swapped(Block, _ShortSkipBlock, "blocks.1")


class _Bf16GradientBlock(_SummingBlock):
    def mlp_sum(self, x_BSD: Tensor, mixed_BSD: Tensor) -> Tensor:
        return backward(x_BSD + mixed_BSD, bf16)


class StreamGradientInBf16(TorchBackend):
    """The gradient of the residual stream is kept in bf16."""

    session_class = swapped(Block, _Bf16GradientBlock)


class _PaddedEmbedding(Embedding):
    def forward(self, tokens_BS: Tensor) -> Tensor:
        padding = tokens_BS[0, :1]
        weight = backward(self.weight, lambda grad: grad.index_fill(0, padding, 0.0))
        return F.embedding(tokens_BS, weight)


class OneTokenWithoutGradient(TorchBackend):
    """One token is taken for padding, and its row gets no gradient from the look-up."""

    session_class = swapped(Embedding, _PaddedEmbedding)
