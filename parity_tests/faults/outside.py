"""Faults in what a session keeps outside its state: loading a state, as every check does, repairs them.

Training is wrong from its second step on. A check therefore also runs several steps in a row without a load, and finds
these faults in the first step (core/parity/evidence/in_a_row.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.core.backend import Batch, State, StepRecord
from lockstep.parity_tests.faults.planting import swap
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.model import Linear, Transformer
from lockstep.torch_backend.precision import Policy, linear
from lockstep.torch_backend.session import TorchSession

COPY = "_copy"


class _CopiedLinear(Linear):
    """A linear layer whose forward pass reads a bf16 copy of the weight; the gradient goes to the weight."""

    def forward(self, x: Tensor, policy: Policy) -> Tensor:
        if policy.operand != torch.bfloat16:
            return super().forward(x, policy)
        if COPY not in self.__dict__:
            self.__dict__[COPY] = self.weight.detach().bfloat16().float()
        weight = self.weight + (self.__dict__[COPY] - self.weight.detach())
        return linear(x, weight, self.bias, policy, self.float8)


class CopyingSession(TorchSession):
    """A session that computes with copies of its weights, which only `load` renews."""

    def build_model(self) -> Transformer:
        return swap(super().build_model(), Linear, _CopiedLinear, "blocks.*")

    def load(self, state: State) -> None:
        super().load(state)
        for module in self.model.modules():
            module.__dict__.pop(COPY, None)


class CopiesMadeByLoadAlone(TorchBackend):
    """The bf16 copies of the weights are made when a state is loaded, and not renewed after a step."""

    session_class = CopyingSession


class _MixingSession(TorchSession):
    old: list[Tensor] | None = None

    def _update(self, grads: list[Tensor], *others: Any) -> None:
        new = [g.clone() for g in grads]
        for g, old in zip(grads, self.old or [], strict=False):
            g.add_(old, alpha=0.1)
        self.old = new
        super()._update(grads, *others)

    def load(self, state: State) -> None:
        super().load(state)
        self.old = None


class OldGradientsMixedIn(TorchBackend):
    """Each step adds a tenth of the last step's gradients to its own, from a buffer that a load clears."""

    session_class = _MixingSession


class _KeepingSession(TorchSession):
    in_step = False

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        self.in_step = True
        try:
            return super().step(batch, norms=norms)
        finally:
            self.in_step = False

    def accumulate(self, batch: Batch) -> Any:
        if not self.in_step:
            return super().accumulate(batch)
        kept = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        result = super().accumulate(batch)
        for name, grad in kept.items():
            self.parameters[name].grad.add_(grad)  # type: ignore[union-attr]
        return result


class StepsClearNoGradients(TorchBackend):
    """A step adds its gradients to those of the step before, unless a check or an evaluation cleared them."""

    session_class = _KeepingSession


class _UnseenSession(TorchSession):
    def _update(self, grads: list[Tensor], coefficient: Any, lr: float, finite: Any) -> None:
        super()._update(grads, coefficient, lr if self._show_step else 2 * lr, finite)


class FartherWhenNotShown(TorchBackend):
    """A step whose gradients are not read uses twice the learning rate."""

    session_class = _UnseenSession


class _SkippingSession(TorchSession):
    def load(self, state: State) -> None:
        kept = {name: p.detach().clone() for name, p in self.parameters.items()}
        super().load(state)
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(kept[name])


class LoadSkipsWeights(TorchBackend):
    """A load restores moments, step and scalars, but no weight, as if no weight's name matched."""

    session_class = _SkippingSession


class _RoundingSession(TorchSession):
    def write(self, folder: Path) -> Any:
        written = super().write(folder)
        for entry in self.optimizer.state.values():
            if "exp_avg_sq" in entry:
                entry["exp_avg_sq"] = entry["exp_avg_sq"].bfloat16().float()
        return written


class MomentsRoundedOnceWritten(TorchBackend):
    """Second moments are rounded to bf16 after a checkpoint has copied them."""

    session_class = _RoundingSession


class _WrittenSession(TorchSession):
    """A session with `written`: whether it has started to write a checkpoint since the last load."""

    written = False

    def write(self, folder: Path) -> Any:
        found = super().write(folder)
        self.written = True
        return found

    def load(self, state: State) -> None:
        super().load(state)
        self.written = False


class _PeakRateSession(_WrittenSession):
    def _update(self, grads: list[Tensor], coefficient: Any, lr: float, finite: Any) -> None:
        super()._update(grads, coefficient, self.config.optim.peak_lr if self.written else lr, finite)


class PeakRateOnceWritten(TorchBackend):
    """After the start of a checkpoint, steps use the peak learning rate; their records report the schedule's."""

    session_class = _PeakRateSession


class _CastSession(_WrittenSession):
    def accumulate(self, batch: Batch) -> Any:
        if not self.written:
            return super().accumulate(batch)
        kept = [p.detach().clone() for p in self.parameters.values()]
        with torch.no_grad():
            for p in self.parameters.values():
                p.copy_(p.bfloat16())
        found = super().accumulate(batch)
        with torch.no_grad():
            for p, own in zip(self.parameters.values(), kept, strict=True):
                p.copy_(own)
        return found


class WeightsCastOnceWritten(TorchBackend):
    """After the start of a checkpoint, passes read all weights in bf16, including gains and the embedding."""

    session_class = _CastSession


class _LateSession(TorchSession):
    held: Batch | None = None
    stepping = False

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        given, self.held, self.stepping = self.held or batch, batch, True
        try:
            return replace(super().step(given, norms=norms), digest=batch.digest())
        finally:
            self.stepping = False

    def accumulate(self, batch: Batch) -> Any:
        if not self.stepping:
            self.held = None
        return super().accumulate(batch)

    def load(self, state: State) -> None:
        super().load(state)
        self.held = None


class OneBatchLate(TorchBackend):
    """A step directly after another trains on that one's batch, from a pipeline that other passes and loads clear."""

    session_class = _LateSession


class _ReplayingSession(TorchSession):
    in_a_row = 0
    stepping = False

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        self.in_a_row, self.stepping = self.in_a_row + 1, True
        try:
            return super().step(batch, norms=norms)
        finally:
            self.stepping = False

    def load(self, state: State) -> None:
        super().load(state)
        self.in_a_row = 0

    def accumulate(self, batch: Batch) -> Any:
        found = super().accumulate(batch)
        if not self.stepping:
            self.in_a_row = 0
        elif self.in_a_row > 2:
            for p in self.parameters.values():
                assert p.grad is not None
                p.grad.mul_(0.5)
        return found


class ReplaysHalfGradients(TorchBackend):
    """From the third step in a row on, gradients are halved, as by a stale graph; other passes and loads renew it."""

    session_class = _ReplayingSession


class _FrozenSession(TorchSession):
    def build_model(self) -> Transformer:
        model = super().build_model()
        for name, p in model.named_parameters():
            if "blocks.0.mlp" in name:
                p.requires_grad_(False)
        return model


class FrozenMlp(TorchBackend):
    """The MLP of one block is frozen, as left over from fine-tuning."""

    session_class = _FrozenSession


class _FirstWeightsSession(TorchSession):
    copies: list[Tensor] | None = None

    def evaluate(self, batch: Batch, policy: str | None = None) -> Any:
        now = [p.detach().clone() for p in self.parameters.values()]
        self.copies = self.copies or now
        self._put(self.copies)
        found = super().evaluate(batch, policy)
        self._put(now)
        return found

    def load(self, state: State) -> None:
        super().load(state)
        self.copies = None

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        for p, value in zip(self.parameters.values(), values, strict=True):
            p.copy_(value)


class EvaluatesFirstWeights(TorchBackend):
    """Evaluation reads a copy of the weights, which only a load renews."""

    session_class = _FirstWeightsSession


class _CachingSession(TorchSession):
    def build_model(self) -> Transformer:
        self.scores: dict[str, Any] = {}
        return super().build_model()

    def evaluate(self, batch: Batch, policy: str | None = None) -> Any:
        key = f"{policy} {batch.digest()}"
        if key not in self.scores:
            self.scores[key] = super().evaluate(batch, policy)
        return self.scores[key]


class ScoresKeptByBatch(TorchBackend):
    """Evaluation caches results by the batch's digest, so the validation loss never changes."""

    session_class = _CachingSession


class _InferenceSession(TorchSession):
    inference = False

    def evaluate(self, batch: Batch, policy: str | None = None) -> Any:
        found = super().evaluate(batch, policy)
        self.inference = True
        return found

    def next_token_logits(self, tokens: Any) -> Any:
        self.inference = False
        return super().next_token_logits(tokens)

    def accumulate(self, batch: Batch) -> Any:
        found = super().accumulate(batch)
        if self.inference:
            for name, p in self.parameters.items():
                if "blocks.1.attn" in name and p.grad is not None:
                    p.grad.zero_()
        return found


class InferenceStays(TorchBackend):
    """After an evaluation, the attention of one block gets no gradient, until the next sampling."""

    session_class = _InferenceSession


class _FirstSamplesSession(_FirstWeightsSession):
    def evaluate(self, batch: Batch, policy: str | None = None) -> Any:
        return TorchSession.evaluate(self, batch, policy)

    def next_token_logits(self, tokens: Any) -> Any:
        now = [p.detach().clone() for p in self.parameters.values()]
        self.copies = self.copies or now
        self._put(self.copies)
        found = super().next_token_logits(tokens)
        self._put(now)
        return found


class SamplesFirstWeights(TorchBackend):
    """Samples of a run are drawn with a copy of the weights, which only a load renews."""

    session_class = _FirstSamplesSession


class _BetasSession(TorchSession):
    def load(self, state: State) -> None:
        super().load(state)
        for group in self.optimizer.param_groups:
            group["betas"] = (self.config.optim.beta1, self.config.optim.beta2)

    def restore(self, folder: Path, step: int, scalars: Any) -> None:
        super().restore(folder, step, scalars)
        for group in self.optimizer.param_groups:
            group["betas"] = (0.9, 0.999)


class RestoreResetsBetas(TorchBackend):
    """After a resume the optimizer has other betas, until a load; the restored state is right."""

    session_class = _BetasSession


class _CountingSession(TorchSession):
    def _update(self, grads: list[Tensor], coefficient: Any, lr: float, finite: Any) -> None:
        super()._update(grads, coefficient, lr, finite)
        if not finite:
            for p in self.parameters.values():
                entry = self.optimizer.state[p]
                if not entry:
                    entry |= {"step": torch.tensor(0.0)}
                    entry |= {kind: torch.zeros_like(p) for kind in ("exp_avg", "exp_avg_sq")}
                entry["step"] += 1


class StepsLeftOutCount(TorchBackend):
    """FP16: bias corrections count skipped steps too, until a load sets the right count."""

    session_class = _CountingSession


class _SeventhSession(TorchSession):
    """A session that counts all its steps; a load does not reset the count."""

    called = 0

    def _update(self, grads: list[Tensor], coefficient: Any, lr: float, finite: Any) -> None:
        self.called += 1
        super()._update(grads, coefficient, 1.5 * lr if self.called % 7 == 3 else lr, finite)


class FartherAtEverySeventhCall(TorchBackend):
    """Every seventh step, from the third on, uses 1.5 times the learning rate."""

    session_class = _SeventhSession
