"""Faults of the session, between the gradients of its program and those that the optimizer gets."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.core.backend import Batch
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.optim import clip_coefficient, global_norm
from lockstep.torch_backend.session import TorchSession

Accumulated = tuple[Tensor, list[Tensor]]


class _ScaledSession(TorchSession):
    def accumulate(self, batch: Batch) -> Accumulated:
        result = super().accumulate(batch)
        gradient = self.parameters["blocks.0.mlp.down_proj.weight"].grad
        assert gradient is not None
        gradient.mul_(1.05)
        return result


class OneGradientScaled(TorchBackend):
    """One gradient a twentieth too long."""

    session_class = _ScaledSession


class _MissingSession(TorchSession):
    def accumulate(self, batch: Batch) -> Accumulated:
        result = super().accumulate(batch)
        self.parameters["final_norm.weight"].grad = None
        return result


class GradientMissing(TorchBackend):
    """One parameter gets no gradient at all (as pytorch #112583)."""

    session_class = _MissingSession


class _ExchangedSession(TorchSession):
    def accumulate(self, batch: Batch) -> Accumulated:
        result = super().accumulate(batch)
        gate, up = (self.parameters[f"blocks.1.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        gate.grad, up.grad = up.grad, gate.grad
        return result


class GradientsExchanged(TorchBackend):
    """Gate and up of the second block get each other's gradients, as from a fused matrix cut the other way round."""

    session_class = _ExchangedSession


class _ClippingSession(TorchSession):
    def accumulate(self, batch: Batch) -> Accumulated:
        self.optimizer.zero_grad(set_to_none=True)
        total = self.total_weight(batch)
        nll: list[Tensor] = []
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        sums = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        micros = batch.micro_batches(min(self.config.train.micro_batch_size, len(batch.tokens)))
        for micro in micros:
            micro_loss, micro_nll = self._micro_loss(*self.to_device(micro), total, *self.documents(micro))
            micro_loss.backward()
            grads = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}
            if len(micros) == 1:
                self.show_program(grads)
            clip = clip_coefficient(self.config.optim, global_norm(grads.values())).to(self.policy.stream)
            for name, grad in grads.items():
                sums[name] += grad * clip
                self.parameters[name].grad = None
            loss, nll = loss + micro_loss.detach(), [*nll, micro_nll.detach()]
        for name, p in self.parameters.items():
            p.grad = sums[name]
        return loss, nll


class ClipsEveryMicroBatch(TorchBackend):
    """Gradients are clipped micro-batch by micro-batch, before they are added."""

    session_class = _ClippingSession


class _MicroBatchSession(TorchSession):
    """A session that adds the gradients of each micro-batch by `join(sum so far, gradient, last)`."""

    def accumulate(self, batch: Batch) -> Accumulated:
        size = min(self.config.train.micro_batch_size, len(batch.tokens))
        if len(batch.tokens) == size:
            return super().accumulate(batch)
        self.optimizer.zero_grad(set_to_none=True)
        total = self.total_weight(batch)
        nll: list[Tensor] = []
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        sums: dict[str, Tensor] = {}
        micros = batch.micro_batches(size)
        for number, micro in enumerate(micros, 1):
            micro_loss, micro_nll = self._micro_loss(*self.to_device(micro), total, *self.documents(micro))
            micro_loss.backward()
            for name, p in self.parameters.items():
                assert p.grad is not None
                sums[name] = self.join(sums[name], p.grad, number == len(micros)) if name in sums else p.grad
                p.grad = None
            loss, nll = loss + micro_loss.detach(), [*nll, micro_nll.detach()]
        for name, p in self.parameters.items():
            p.grad = sums[name]
        return loss, nll

    def join(self, total: Tensor, part: Tensor, last: bool) -> Tensor:
        raise NotImplementedError


class _DoublingSession(_MicroBatchSession):
    def join(self, total: Tensor, part: Tensor, last: bool) -> Tensor:
        return 2 * (total + part)


class DoublesWithEveryMicroBatch(TorchBackend):
    """The sum of gradients doubles with every further micro-batch (Megatron #6660)."""

    session_class = _DoublingSession


class _Bf16SumSession(_MicroBatchSession):
    def join(self, total: Tensor, part: Tensor, last: bool) -> Tensor:
        return (total.bfloat16() + part.bfloat16()).to(total.dtype)


class AccumulatesInBf16(TorchBackend):
    """Gradients of micro-batches are added in bf16 (as pytorch #106395)."""

    session_class = _Bf16SumSession


class _ForgettingSession(_MicroBatchSession):
    def join(self, total: Tensor, part: Tensor, last: bool) -> Tensor:
        return total if last else total + part


class LastMicroBatchForgotten(TorchBackend):
    """The last micro-batch counts in the loss and not in the gradients."""

    session_class = _ForgettingSession
