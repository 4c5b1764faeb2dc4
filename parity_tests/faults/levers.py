"""Faults of optional parts: the chunked head, FP8 layers, the loss scale, recomputation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lockstep.core.backend import Batch, StepRecord
from lockstep.core.train.fp8_amax import PREFIX, key
from lockstep.core.train.loss_scale import SCALE
from lockstep.parity_tests.faults.planting import bf16, in_model, swap
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.loss import weighted_mean
from lockstep.torch_backend.model import Linear, SwiGLU, Transformer
from lockstep.torch_backend.precision import Policy, linear, wide_product
from lockstep.torch_backend.session import TorchSession


class _WrongChunks(torch.autograd.Function):
    """Add faulty gradients to those of the chunked head: the loss is unchanged, `change` returns what is added."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, x: Tensor, weight: Tensor, targets: Tensor, change: Any) -> Tensor:
        ctx.save_for_backward(x, weight, targets)
        ctx.change = change
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], *ctx.change(*ctx.saved_tensors), None, None


def _chunked(change: Any) -> type[TorchSession]:
    """Return a session class whose chunked head adds the gradients that `change` returns to those of its inputs."""

    def plant(model: Transformer) -> None:
        right = model.fused_loss
        if right is None:
            return

        def wrong(*inputs: Any) -> tuple[Tensor, Tensor]:
            x, weight, targets, weights, total, *_ = inputs
            loss, nll = right(*inputs)
            return _WrongChunks.apply(loss, x, weight, targets, lambda *at: change(*at, weights, total)), nll

        model.fused_loss = wrong

    return in_model(plant)


def _of_logits(x: Tensor, weight: Tensor, targets: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return the head's operands (N, D), and the rounded gradient of its logits (N, V) for these loss shares (N,)."""
    flat, narrow = x.flatten(0, 1).bfloat16(), weight.bfloat16()
    logits = wide_product(flat, narrow.T, torch.float32).double()
    grad = (logits.softmax(-1) - torch.nn.functional.one_hot(targets.flatten(), len(weight))) * shares[:, None]
    return flat, grad.bfloat16()


def _sum_in_bf16(x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, total: Tensor) -> tuple[Any, Tensor]:
    flat, grad = _of_logits(x, weight, targets, (weights.double() / total).flatten())
    right, found = wide_product(grad.T, flat, torch.float32), torch.zeros_like(weight, dtype=torch.bfloat16)
    for part, rows in zip(grad.split(64), flat.split(64), strict=True):
        found = found + wide_product(part.T, rows, torch.float32).bfloat16()
    return None, found.float() - right


class ChunksSummedInBf16(TorchBackend):
    """The chunked head adds the weight's gradient in bf16, 64 tokens at a time (Liger #1391)."""

    session_class = _chunked(_sum_in_bf16)


def _without_weights(x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, total: Tensor) -> tuple[Any, Tensor]:
    shares = (weights.double() / total).flatten()
    flat, right = _of_logits(x, weight, targets, shares)
    _, wrong = _of_logits(x, weight, targets, (weights > 0).double().flatten() / total)
    return None, wide_product(wrong.T, flat, torch.float32) - wide_product(right.T, flat, torch.float32)


class ChunksIgnoreTheWeights(TorchBackend):
    """The chunked head's weight gradient takes every token's loss weight for one (Liger #1298)."""

    session_class = _chunked(_without_weights)


def _nothing_for_x(x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, total: Tensor) -> tuple[Tensor, Any]:
    _, grad = _of_logits(x, weight, targets, (weights.double() / total).flatten())
    return -torch.matmul(grad, weight.bfloat16()).float().view_as(x), None


class ChunksSendNothingBack(TorchBackend):
    """The chunked head gives the hidden states a gradient of zero (Megatron #1750)."""

    session_class = _chunked(_nothing_for_x)


def _unscaled(model: Transformer) -> None:
    right = model.fused_loss
    assert right is not None

    def wrong(*inputs: Any) -> tuple[Tensor, Tensor]:
        x, weight, targets, weights, total, policy, tap = inputs
        # With the largest weight as the total, the head's scale factor max(weights) / total is 1. The library then gets
        # the gradient 1 / tokens unscaled, and rounds it.
        _, nll = right(x, weight, targets, weights, weights.max(), policy, lambda _, value: value)
        nll = tap("nll", nll)
        return weighted_mean(nll, weights, total), nll

    model.fused_loss = wrong


class LibraryHeadGetsRoundedShares(TorchBackend):
    """A library's loss head is handed the gradient 1 / tokens in bf16: all gradients are off by its rounding."""

    session_class = in_model(_unscaled)


class _HalfTheTokens(Linear):
    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        """Clamp x at the smaller of the two halves' amaxes, as a scale made from that half would."""
        assert self.float8 is not None
        low = x.bfloat16()
        most = torch.stack([half.abs().amax() for half in low.detach().flatten(0, -2).chunk(2)]).amin()
        return self.float8.product(low.clamp(-most, most), self.weight).float()


class AmaxOfHalfTheTokens(TorchBackend):
    """FP8: one layer's scale is that of the wrong half of its tokens: what is larger is cut (Megatron PR#442)."""

    session_class = in_model(lambda model: swap(model, Linear, _HalfTheTokens, "blocks.1.mlp.down_proj"))


def _left_out(model: Transformer) -> None:
    for name, module in model.named_modules():
        if name == "blocks.1.mlp.up_proj":
            assert isinstance(module, Linear)
            module.float8 = None


class LayerLeftOutOfFloat8(TorchBackend):
    """FP8: one layer that should be converted computes in bf16, and nothing reports it (torchtitan #4008)."""

    session_class = in_model(_left_out)


class _StaleWeight(Linear):
    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        scale = self.weight.detach().abs().amax()
        first = self.__dict__.setdefault("_first", scale)
        # The weight is cast with the scale of the first step, which clamps values that have grown beyond its range.
        within = self.weight.clamp(-first * 0.98, first * 0.98)
        return linear(x, within, self.bias, policy, self.float8)


class WeightScaleStale(TorchBackend):
    """FP8: one layer casts its weight by a scale that is too old: the largest two hundredths are cut (TE #825)."""

    session_class = in_model(lambda model: swap(model, Linear, _StaleWeight, "blocks.1.attn.o_proj"))


class _OneStepLate(TorchSession):
    def _set_amaxes(self) -> None:
        right = self.scalars
        self.scalars = {name: 0.0 if name.startswith(PREFIX) and name.endswith("/0") else right[name] for name in right}
        super()._set_amaxes()
        self.scalars = right


class ScalesOneStepLate(TorchBackend):
    """FP8, delayed: scales are computed from a history without the last step (as Megatron PR#442, TE #825)."""

    session_class = _OneStepLate


class _ScalesStay(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        before = [amax.detach().clone() for amax in self.amaxes.values()]
        record = super().step(batch, norms=norms)
        with torch.no_grad():
            for amax, old in zip(self.amaxes.values(), before, strict=True):
                amax.copy_(old)
        return record


class ScalesOnlyLoaded(TorchBackend):
    """FP8, delayed: scales are computed only when a state is loaded, and not after a step."""

    session_class = _ScalesStay


class _Forgetful(TorchSession):
    def scalars_after(self, finite: bool) -> dict[str, float]:
        after = super().scalars_after(finite)
        return after | {name: 0.0 for name in after if name.startswith(PREFIX) and not name.endswith("/0")}


class HistoryForgets(TorchBackend):
    """FP8, delayed: the history of amaxes keeps only the last step."""

    session_class = _Forgetful


class _AnotherLayers(TorchSession):
    def scalars_after(self, finite: bool) -> dict[str, float]:
        after = super().scalars_after(finite)
        mine, theirs = (key(f"blocks.1.attn.{name}_proj", "weight", 0) for name in "oq")
        return after | {mine: after[theirs]}


class AmaxOfAnotherLayer(TorchBackend):
    """FP8, delayed: the weight amax of one layer is recorded for another, whose next scale is then wrong."""

    session_class = _AnotherLayers


class _LastOne(TorchSession):
    def _forward_backward(self, micro: Batch, program: Any, total: Tensor) -> tuple[Tensor, Tensor]:
        self._amaxes_seen = None
        return super()._forward_backward(micro, program, total)


class AmaxOfTheLastMicroBatch(TorchBackend):
    """FP8, delayed: the amaxes of a step are those of its last micro-batch, not the maximum over all."""

    session_class = _LastOne


class _LastSequence(torch.autograd.Function):
    """Return the amaxes unchanged. Their gradient, the new amaxes, has that of x's last sequence in place of x's."""

    @staticmethod
    def forward(ctx: Any, amax: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x[-1].abs().amax())
        return amax.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (seen,) = ctx.saved_tensors
        return torch.cat([seen.to(grads[0].dtype)[None], grads[0][1:]]), None


class _OneSequence(Linear):
    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        """Record the amax of the last sequence of x as that of x."""
        assert self.float8 is not None
        noted = _LastSequence.apply(self.float8.amax, x.detach().bfloat16())
        return linear(x, self.weight, self.bias, policy, replace(self.float8, amax=noted))


class AmaxOfOneSequence(TorchBackend):
    """FP8, delayed: one layer records the amax of a micro-batch's last sequence, not of all its tokens."""

    session_class = in_model(lambda model: swap(model, Linear, _OneSequence, "blocks.1.mlp.down_proj"))


class _ClipsScaled(TorchSession):
    def clip_coefficient(self, norm: Tensor) -> Tensor:
        return super().clip_coefficient(norm * self.scale)


class ClipsBeforeUnscaling(TorchBackend):
    """FP16: gradients are clipped by the norm that they have under the loss scale (Lightning #9330)."""

    session_class = _ClipsScaled


class _NeverGrows(TorchSession):
    def scalars_after(self, finite: bool) -> dict[str, float]:
        after = super().scalars_after(finite)
        return {**after, SCALE: min(after[SCALE], self.scalars[SCALE])}


class LossScaleNeverGrows(TorchBackend):
    """FP16: the loss scale halves but never doubles."""

    session_class = _NeverGrows


class _StepsAnyway(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> Any:
        record = super().step(batch, norms=norms)
        if record.metrics["skipped_steps"]:
            with torch.no_grad():
                self.parameters["blocks.0.mlp.up_proj.weight"].mul_(1 - 1e-6)
        return record


class SkippedStepMovesAWeight(TorchBackend):
    """FP16: a step that is left out for its infinite gradients decays a weight all the same."""

    session_class = _StepsAnyway


class _OtherTheSecondTime(SwiGLU):
    def activate(self, gate_BSF: Tensor, up_BSF: Tensor) -> Tensor:
        act_BSF = super().activate(gate_BSF, up_BSF)
        # The id is not -1 while autograd runs a backward pass, and so during recomputation.
        again = torch._C._current_graph_task_id() != -1
        return bf16(act_BSF) * (1 + 2.0**-7) if again else act_BSF


class RecomputeDiffers(TorchBackend):
    """SwiGLU's recomputed values are a little longer than the first ones (pytorch #190758)."""

    session_class = in_model(lambda model: swap(model, SwiGLU, _OtherTheSecondTime))
