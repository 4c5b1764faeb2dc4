"""Suspects of the incident (docs/results/incident.md), each a candidate: a trainer that is wrong in one way.

    lockstep parity configs/quickstart.toml --compile.enabled false --candidate
    docs/results/incident/suspects.py:FrozenBuffers

Eager only: what a captured program's buffers hold is played with Python objects, which torch.compile cannot trace.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.core.backend import Batch
from lockstep.core.config.schema import RunConfig
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.model import Attention, Transformer
from lockstep.torch_backend.precision import Policy
from lockstep.torch_backend.session import TorchSession


def bf16(x: Tensor) -> Tensor:
    """Round to bf16, dtype kept."""
    return x.bfloat16().to(x.dtype)


def turned(model: Transformer, right: type[nn.Module], wrong: type[nn.Module], first_only: bool = False) -> Transformer:
    """Turn the model's modules of class `right`, or the first of them, into `wrong`, weights kept; return the model."""
    found = [module for module in model.modules() if type(module) is right]
    for module in found[:1] if first_only else found:
        module.__class__ = wrong
    return model


# Suspects in the arithmetic of the loss. Outside the training program (`evaluate`) they round nothing, as a metric
# outside autocast would not.


class _RoundedLogits(Transformer):
    def forward(self, tokens_BS: Tensor, targets_BS: Tensor, policy: Policy) -> Tensor:
        logits_BSV = self.tap("logits", bf16(self.logits(self.trunk(tokens_BS, policy, self.tap), policy)))
        return self.tap("nll", self.nll(logits_BSV, targets_BS))


class _RoundedLogitsSession(TorchSession):
    def build_model(self) -> Transformer:
        return turned(super().build_model(), Transformer, _RoundedLogits)


class Bf16Logits(TorchBackend):
    """Logits leave the head in bf16; the cross-entropy is FP32. Autocast does that with `cross_entropy`."""

    session_class = _RoundedLogitsSession


class _TorchBf16Loss(Transformer):
    def forward(self, tokens_BS: Tensor, targets_BS: Tensor, policy: Policy) -> Tensor:
        logits_BSV = self.tap("logits", self.logits(self.trunk(tokens_BS, policy, self.tap), policy))
        nll_BS = F.cross_entropy(logits_BSV.bfloat16().movedim(-1, 1), targets_BS, reduction="none")
        return self.tap("nll", nll_BS.to(logits_BSV.dtype))


class _TorchBf16LossSession(TorchSession):
    def build_model(self) -> Transformer:
        return turned(super().build_model(), Transformer, _TorchBf16Loss)


class TorchBf16CrossEntropy(TorchBackend):
    """torch's `cross_entropy` on bf16 logits without autocast: bf16 in, bf16 out, FP32 inside the kernel."""

    session_class = _TorchBf16LossSession


def bf16_nll(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Return max + log Σ exp(z − max) − z of the target in bf16 arithmetic: (B, S, V), (B, S) → bf16 (B, S)."""
    low = logits_BSV.bfloat16()
    most = low.detach().amax(-1)
    logsumexp = most + (low - most[..., None]).exp().sum(-1).log()
    return logsumexp - low.gather(-1, targets_BS[..., None])[..., 0]


class _AllBf16Loss(Transformer):
    def forward(self, tokens_BS: Tensor, targets_BS: Tensor, policy: Policy) -> Tensor:
        logits_BSV = self.tap("logits", self.logits(self.trunk(tokens_BS, policy, self.tap), policy))
        return self.tap("nll", bf16_nll(logits_BSV, targets_BS).to(logits_BSV.dtype))


class _AllBf16LossSession(TorchSession):
    def build_model(self) -> Transformer:
        return turned(super().build_model(), Transformer, _AllBf16Loss)


class AllBf16CrossEntropy(TorchBackend):
    """A cross-entropy written by hand in which every operation rounds its result to bf16."""

    session_class = _AllBf16LossSession


def bf16_running_sum(values: Tensor) -> Tensor:
    """Sum `values`, added up one by one in a bf16 accumulator; float64 scalar."""
    total = np.float32(0)
    for value in values.detach().flatten().float().numpy():
        total = bf16_of(total + value)
    return torch.tensor(float(total), dtype=torch.float64)


def bf16_of(value: np.float32) -> np.float32:
    """Round a finite FP32 number to bf16, to nearest, ties to even."""
    bits = value.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(
        np.float32
    )


class _Bf16MeanSession(TorchSession):
    def micro_loss(self, tokens: Tensor, targets: Tensor, weights: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        loss, nll = super().micro_loss(tokens, targets, weights, total)
        # The gradient of a sum does not depend on how the sum was rounded.
        return loss + (bf16_running_sum(nll * weights) / total - loss).detach(), nll


class Bf16Mean(TorchBackend):
    """The mean over tokens is accumulated in bf16: the sum stops growing at some 256 times its terms."""

    session_class = _Bf16MeanSession


# Suspects in the data and in what attention may see.


class _UnshiftedSession(TorchSession):
    def to_device(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        tokens, _, weights = super().to_device(batch)
        return tokens, tokens, weights


class TargetsNotShifted(TorchBackend):
    """The loader gives each token as its own target; a metric on the loader's batch has the same targets."""

    session_class = _UnshiftedSession


class _RepeatingSession(TorchSession):
    def to_device(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        half = max(len(batch.tokens) // 2, 1)
        tokens, targets, weights = (x[:half] for x in super().to_device(batch))
        rows = torch.arange(len(batch.tokens)) % half
        return tokens[rows], targets[rows], weights[rows]


class MicroBatchRepeated(TorchBackend):
    """The second half of every batch is the first half again."""

    session_class = _RepeatingSession


class _AheadAttention(Attention):
    ahead = 1

    def attend(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, policy: Policy) -> Tensor:
        q = q_BSHE.to(policy.operand).transpose(1, 2)
        k = self.expand(k_BSKE).to(policy.operand).transpose(1, 2)
        v = self.expand(v_BSKE).to(policy.operand).transpose(1, 2)
        allowed = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril(self.ahead)
        out_BHSE = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return out_BHSE.transpose(1, 2).to(policy.stream)


class _UnmaskedAttention(_AheadAttention):
    ahead = 1 << 30


class _AheadSession(TorchSession):
    def build_model(self) -> Transformer:
        return turned(super().build_model(), Attention, _AheadAttention, first_only=True)


class SeesOneTokenAhead(TorchBackend):
    """The first block attends one token into the future."""

    session_class = _AheadSession


class _UnmaskedSession(TorchSession):
    def build_model(self) -> Transformer:
        return turned(super().build_model(), Attention, _UnmaskedAttention)


class NoCausalMask(TorchBackend):
    """Attention without a causal mask in every block."""

    session_class = _UnmaskedSession


# Suspects in the static buffers that a captured program (CUDA graph) reads. `evaluate`, like a metric outside the
# captured program, reads the loop's own batch.

Held = tuple[Tensor, Tensor]


class _CapturedSession(TorchSession):
    onset = 0

    def micro_loss(self, tokens: Tensor, targets: Tensor, weights: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        held = self.held(self.steps_done + 1, (tokens, targets))
        return super().micro_loss(*held, weights, total)

    def held(self, step: int, fresh: Held) -> Held:
        """Return tokens and targets (B, S) that the program reads at this step, given those of the step's batch."""
        raise NotImplementedError


class FromAStepOn(TorchBackend):
    """Honest up to step `onset`: as a candidate of `lockstep parity`, in the first step."""

    session_class: type[_CapturedSession]
    onset = 1

    def open_rank(self, config: RunConfig) -> TorchSession:
        """Open a session that knows its first bad step."""
        session = super().open_rank(config)
        assert isinstance(session, _CapturedSession)
        session.onset = self.onset
        return session


class _RingSession(_CapturedSession):
    slots = 1

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.ring: dict[int, Held] = {}

    def held(self, step: int, fresh: Held) -> Held:
        slot = step % self.slots
        if step <= self.onset:
            self.ring[slot] = fresh
        return self.ring.get(slot, fresh)


class FrozenBuffers(FromAStepOn):
    """Static buffers into which nothing is copied any more from a step on: tokens and targets stay the same."""

    session_class = _RingSession


class _RingOfEightSession(_RingSession):
    slots = 8


class FrozenRing(FromAStepOn):
    """A loader whose ring of eight buffers is not refilled from a step on: the same eight batches over and over."""

    session_class = _RingOfEightSession


class _FrozenTargetsSession(_RingSession):
    def held(self, step: int, fresh: Held) -> Held:
        return fresh[0], super().held(step, fresh)[1]


class FrozenTargets(FromAStepOn):
    """A copy of the tokens alone from a step on: the targets stay those of an old batch."""

    session_class = _FrozenTargetsSession


class _OverwrittenSession(_CapturedSession):
    def held(self, step: int, fresh: Held) -> Held:
        return fresh if step <= self.onset else (fresh[0], fresh[0])


class TargetsOverwritten(FromAStepOn):
    """Targets that share the tokens' memory from a step on: the tokens overwrite them before the loss."""

    session_class = _OverwrittenSession


class _LateSession(_CapturedSession):
    late_tokens = True

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.seen: dict[int, Held] = {}

    def held(self, step: int, fresh: Held) -> Held:
        self.seen = {n: held for n, held in self.seen.items() if n == step - 1} | {step: fresh}
        old = self.seen.get(step - 1, fresh) if step > self.onset else fresh
        return old if self.late_tokens else (fresh[0], old[1])


class OneStepLate(FromAStepOn):
    """Tokens and targets of the step before, from a step on."""

    session_class = _LateSession


class _LateTargetsSession(_LateSession):
    late_tokens = False


class TargetsOneStepLate(FromAStepOn):
    """Fresh tokens with the targets of the step before, from a step on."""

    session_class = _LateTargetsSession
