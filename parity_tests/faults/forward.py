"""Faults in the forward pass outside attention and loss: embedding, norms, projections, activation, residual."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.core.backend import Batch
from lockstep.parity_tests.faults.attention import KvHeadsTiled, RopeInBf16
from lockstep.parity_tests.faults.planting import bf16, in_model, rounded_down, swapped
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.model import Block, Embedding, Linear, RMSNorm, Rope, SwiGLU, Tap, Transformer
from lockstep.torch_backend.precision import Policy
from lockstep.torch_backend.session import TorchSession

# Tests run these two as candidates by the name `forward.py:…`.
__all__ = ["KvHeadsTiled", "RopeInBf16"]


class _Bf16Embedding(Embedding):
    def forward(self, tokens_BS: Tensor) -> Tensor:
        return bf16(super().forward(tokens_BS))


class EmbeddingInBf16(TorchBackend):
    """The embedding's rows enter the residual stream in bf16."""

    session_class = swapped(Embedding, _Bf16Embedding)


class _StaleSession(TorchSession):
    def to_device(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        tokens, targets, weights = super().to_device(batch)
        buffers: dict[int, Tensor] = self.__dict__.setdefault("buffers", {})
        buffers.setdefault(self.steps_done, tokens)
        return buffers.get(self.steps_done - 1, tokens), targets, weights


class StaleInputBuffer(TorchBackend):
    """From the second step on, the tokens of the step before are still in the input buffer."""

    session_class = _StaleSession


class _Bf16Norm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        low = x.bfloat16()
        return (low * torch.rsqrt(low.square().mean(-1, keepdim=True) + self.eps) * self.weight.bfloat16()).to(x.dtype)


class RmsNormInBf16(TorchBackend):
    """RMSNorm computed in bf16."""

    session_class = swapped(RMSNorm, _Bf16Norm)


def _small_epsilon(model: Transformer) -> None:
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.eps = 1e-6


class NormEpsilon(TorchBackend):
    """RMSNorm's epsilon 1e-6 where the configuration has 1e-5."""

    session_class = in_model(_small_epsilon)


class _LongLinear(Linear):
    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        return super().forward(x, policy) * 1.001


def _last_query(model: Transformer) -> None:
    block = model.blocks[-1]
    assert isinstance(block, Block)
    block.attn.q_proj.__class__ = _LongLinear


class QueryScaled(TorchBackend):
    """Queries of the last block a thousandth too long."""

    session_class = in_model(_last_query)


class _HardlyLongLinear(Linear):
    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        return super().forward(x, policy) * 1.0007


class ValuesHardlyLong(TorchBackend):
    """Values of the first block 7 in 10,000 too long: in bf16, less than one step's bound."""

    session_class = swapped(Linear, _HardlyLongLinear, "blocks.0.attn.v_proj")


class _WideLinear(Linear):
    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class DownProjectionInFp32(TorchBackend):
    """SwiGLU's last projection is not cast to bf16: the declared precision is not in force (as torchtitan #4008)."""

    session_class = swapped(Linear, _WideLinear, "*.down_proj")


class _LeakyLinear(Linear):
    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        return F.dropout(super().forward(x, policy), 0.1, training=True)


class DropoutLeftOn(TorchBackend):
    """Dropout of one in ten on the output of SwiGLU."""

    session_class = swapped(Linear, _LeakyLinear, "*.down_proj")


class _GeluSwiGLU(SwiGLU):
    def activate(self, gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
        return F.gelu(gate_BSF) * up_BSF


class GeluForSilu(TorchBackend):
    """GELU where SiLU belongs."""

    session_class = swapped(SwiGLU, _GeluSwiGLU)


class _SummingBlock(Block):
    """A block that computes its two residual sums in a method, which a fault can override."""

    def attn_sum(self, x_BSD: Tensor, mixed_BSD: Tensor) -> Tensor:
        return x_BSD + mixed_BSD

    def mlp_sum(self, x_BSD: Tensor, mixed_BSD: Tensor) -> Tensor:
        return x_BSD + mixed_BSD

    def forward(self, x_BSD: Tensor, rope: Rope, policy: Policy, tap: Tap, name: str) -> Tensor:
        normed_BSD = tap(f"{name}.attn_norm", self.attn_norm(tap(f"{name}.attn_norm.x", x_BSD)))
        mixed_BSD = self.attn(normed_BSD, rope, policy, tap, f"{name}.attn")
        x_BSD = tap(f"{name}.attn_residual", self.attn_sum(tap(f"{name}.attn_residual.x", x_BSD), mixed_BSD))
        normed_BSD = tap(f"{name}.mlp_norm", self.mlp_norm(tap(f"{name}.mlp_norm.x", x_BSD)))
        mixed_BSD = self.mlp(normed_BSD, policy, tap, f"{name}.mlp")
        return tap(f"{name}.mlp_residual", self.mlp_sum(tap(f"{name}.mlp_residual.x", x_BSD), mixed_BSD))


class _Bf16ResidualBlock(_SummingBlock):
    def attn_sum(self, x_BSD: Tensor, mixed_BSD: Tensor) -> Tensor:
        return bf16(x_BSD + mixed_BSD)

    mlp_sum = attn_sum


class ResidualInBf16(TorchBackend):
    """The residual stream kept in bf16."""

    session_class = swapped(Block, _Bf16ResidualBlock)


class _DampedBlock(_SummingBlock):
    def mlp_sum(self, x_BSD: Tensor, mixed_BSD: Tensor) -> Tensor:
        return x_BSD + 0.99 * mixed_BSD


class BranchDamped(TorchBackend):
    """The second block's SwiGLU enters the stream a hundredth too short, as with a residual scale left over."""

    session_class = swapped(Block, _DampedBlock, "blocks.1")


class _RoundingDownBlock(_SummingBlock):
    def mlp_sum(self, x_BSD: Tensor, mixed_BSD: Tensor) -> Tensor:
        return rounded_down(x_BSD + mixed_BSD, 3)


class StreamRoundsDown(TorchBackend):
    """The second block's sum keeps 21 bits of 24 and rounds toward −∞, as FP32 made of TF32 parts may."""

    session_class = swapped(Block, _RoundingDownBlock, "blocks.1")
