"""Faults in the update: from accumulated gradients to new weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lockstep.core.backend import Batch, State, StepRecord
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.optim import Muon, MuonAndAdamW
from lockstep.torch_backend.session import TorchSession


class _DecaySession(TorchSession):
    def build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer()
        for group in optimizer.param_groups:
            if group["group"] == "gains":
                group["weight_decay"] = self.config.optim.weight_decay
        return optimizer


class DecayOnNormGains(TorchBackend):
    """Weight decay on the norms' gains."""

    session_class = _DecaySession


class _BiasCorrectionSession(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        for p in self.parameters.values():
            entry = self.optimizer.state[p]
            if not entry:
                entry |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            entry["step"] = torch.tensor(self.steps_done + 1.0)
        return super().step(batch, norms=norms)


class BiasCorrectionOneStepOff(TorchBackend):
    """Adam corrects the bias of step t + 1 at step t."""

    session_class = _BiasCorrectionSession


class _BetaSession(TorchSession):
    def build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer()
        for group in optimizer.param_groups:
            group["betas"] = (self.config.optim.beta1, 0.999)
        return optimizer


class WrongBeta(TorchBackend):
    """β₂ = 0.999 where the configuration has 0.95."""

    session_class = _BetaSession


class _SwallowingSession(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        record = super().step(batch, norms=norms)
        with torch.no_grad():
            for p in self.parameters.values():
                p.copy_(p.bfloat16())
        return record


class UpdateSwallowed(TorchBackend):
    """Master weights live in bf16, which swallows small updates (0 of 768 weights moved, in a public report)."""

    session_class = _SwallowingSession


class _TwiceSession(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        record = super().step(batch, norms=norms)
        extra = self.parameters["embed.weight"].grad
        assert extra is not None
        twice = (record.grad_norm**2 + float((extra / record.clip_coefficient).norm()) ** 2) ** 0.5
        limit = self.config.optim.clip_norm
        return replace(record, grad_norm=twice, clip_coefficient=min(1.0, limit / (twice + 1e-6)))


class NormCountsOneTwice(TorchBackend):
    """The embedding counts twice in the global norm (ROCm TE #715)."""

    session_class = _TwiceSession


class _NeverClipsSession(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        limit = self.config.optim.clip_norm
        self.config = self.config.model_copy(update={"optim": self.config.optim.model_copy(update={"clip_norm": 0.0})})
        record = super().step(batch, norms=norms)
        self.config = self.config.model_copy(
            update={"optim": self.config.optim.model_copy(update={"clip_norm": limit})}
        )
        return record


class NeverClips(TorchBackend):
    """Gradients above the limit are not clipped."""

    session_class = _NeverClipsSession


class _SilentClipSession(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        optim = self.config.optim
        self.config = self.config.model_copy(
            update={"optim": optim.model_copy(update={"clip_norm": optim.clip_norm / 2})}
        )
        record = super().step(batch, norms=norms)
        self.config = self.config.model_copy(update={"optim": optim})
        return replace(record, clip_coefficient=min(1.0, optim.clip_norm / (record.grad_norm + 1e-6)))


class ClipsWithoutSayingSo(TorchBackend):
    """The coefficient in the record is right, the one that was applied is not."""

    session_class = _SilentClipSession


class _LateSession(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        config = self.config
        optim = config.optim.model_copy(update={"warmup_steps": config.optim.warmup_steps + 1})
        self.config = config.model_copy(update={"optim": optim})
        record = super().step(batch, norms=norms)
        self.config = config
        return record


class LearningRateOneStepLate(TorchBackend):
    """The warm-up is one step longer than configured."""

    session_class = _LateSession


class _ImpatientSession(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        config = self.config
        warmup = max(1, config.optim.warmup_steps // config.train.accumulation)
        self.config = config.model_copy(update={"optim": config.optim.model_copy(update={"warmup_steps": warmup})})
        record = super().step(batch, norms=norms)
        self.config = config
        return record


class ScheduleCountsMicroBatches(TorchBackend):
    """The schedule steps once a micro-batch: the warm-up is over in half its time (transformers #24088)."""

    session_class = _ImpatientSession


class _NoDecaySession(TorchSession):
    def build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer()
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        return optimizer


class DecayWithoutEffect(TorchBackend):
    """1 − lr·λ is rounded to bf16, which is 1: no weight decays (OneTrainer #996)."""

    session_class = _NoDecaySession


class _NoEpsilonSession(TorchSession):
    def build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer()
        for group in optimizer.param_groups:
            group["eps"] = 0.0
        return optimizer


class EpsilonUnderflows(TorchBackend):
    """Adam's ε goes through FP16, where 1e-8 is zero (optax #1754)."""

    session_class = _NoEpsilonSession


class _CoupledSession(TorchSession):
    def build_optimizer(self) -> torch.optim.Optimizer:
        groups = super().build_optimizer().param_groups
        kept = [{key: group[key] for key in ("params", "group", "lr_factor", "weight_decay")} for group in groups]
        optim = self.config.optim
        return torch.optim.Adam(kept, lr=optim.peak_lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, foreach=True)


class DecayInTheGradient(TorchBackend):
    """Weight decay is added to the gradient, Adam for AdamW, and enters the moments."""

    session_class = _CoupledSession


class _LowMomentSession(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        record = super().step(batch, norms=norms)
        for p in self.parameters.values():
            entry = self.optimizer.state[p]
            entry["exp_avg_sq"] = entry["exp_avg_sq"].bfloat16().to(p.dtype)
        return record


class SecondMomentInBf16(TorchBackend):
    """The second moment is stored in bf16, which cannot hold what β₂ leaves of it."""

    session_class = _LowMomentSession


class _NoTailSession(TorchSession):
    VECTOR = 48

    def _tails(self) -> dict[Tensor, Tensor]:
        """Return the elements of each weight and moment after the last whole vector; zeros if there are no moments."""
        held = [p.detach() for p in self.parameters.values()]
        held += [self.optimizer.state[p][kind] for p in self.parameters.values() for kind in ("exp_avg", "exp_avg_sq")]
        return {x: x.flatten()[x.numel() - x.numel() % self.VECTOR :].clone() for x in held}

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        if not self.steps_done:
            self.load(self.state())
        before = self._tails()
        record = super().step(batch, norms=norms)
        for x, tail in before.items():
            x.view(-1)[x.numel() - len(tail) :] = tail
        return record


class FusedUpdateLeavesOutTheTail(TorchBackend):
    """The fused AdamW takes whole vectors of a tensor, and what is left at its end is not updated."""

    session_class = _NoTailSession


class _FrozenSession(TorchSession):
    def build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer()
        frozen = self.parameters["blocks.1.attn.o_proj.weight"]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p is not frozen]
        return optimizer


class ParameterNotInOptimizer(TorchBackend):
    """The optimizer was built without the second block's output projection."""

    session_class = _FrozenSession


class _AmsgradSession(TorchSession):
    def build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer()
        for group in optimizer.param_groups:
            group["amsgrad"] = True
        return optimizer

    def load(self, state: State) -> None:
        # The canonical state does not contain AMSGrad's largest second moment, so a load must keep it.
        largest = {p: self.optimizer.state[p].get("max_exp_avg_sq") for p in self.parameters.values()}
        super().load(state)
        for p, value in largest.items():
            self.optimizer.state[p]["max_exp_avg_sq"] = torch.zeros_like(p) if value is None else value


class AmsgradLeftOn(TorchBackend):
    """AMSGrad divides by the largest second moment so far, the same as Adam's in the first step."""

    session_class = _AmsgradSession


class _StaleGradientSession(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        self._stepping = True
        record = super().step(batch, norms=norms)
        self._stepping = False
        self._left = {name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None}
        return record

    def accumulate(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        result = super().accumulate(batch)
        if self.__dict__.get("_stepping"):
            for name, grad in self.__dict__.get("_left", {}).items():
                of_parameter = self.parameters[name].grad
                assert of_parameter is not None
                of_parameter.add_(grad)
        return result


class GradientsNotZeroed(TorchBackend):
    """The step begins with the gradients that the step before left behind."""

    session_class = _StaleGradientSession


class _GroupRateSession(TorchSession):
    def build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer()
        for group in optimizer.param_groups:
            if group["group"] == "gains":
                group["lr_factor"] = 1.0
        return optimizer


class GainsAtTheRateOfTheRest(TorchBackend):
    """The configuration gives the norms' gains a learning rate of their own, the optimizer has one rate for all."""

    session_class = _GroupRateSession


class _UnscaledMuon(Muon):
    def length(self, rows: int, columns: int) -> float:
        return 1.0


class OtherMuonSession(TorchSession):
    """A session that replaces its Muon by the faulty class `muon`."""

    muon: type[Muon] = _UnscaledMuon

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Return the session's optimizers, with `muon` as the first."""
        optimizer = super().build_optimizer()
        assert isinstance(optimizer, MuonAndAdamW)
        optimizer.optimizers[0].__class__ = self.muon
        return optimizer


class MuonWithoutItsLength(TorchBackend):
    """Muon's update has singular values near 1 and is not scaled by 0.2·√max(rows, columns) to AdamW's size."""

    session_class = OtherMuonSession


class _PlainMomentumSession(TorchSession):
    def build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer()
        for group in optimizer.param_groups:
            if "nesterov" in group:
                group["nesterov"] = False
        return optimizer


class MuonWithoutNesterov(TorchBackend):
    """Muon orthogonalises its momentum where the configuration has Nesterov's, one gradient ahead of it."""

    session_class = _PlainMomentumSession


class _StaleScaleSession(TorchSession):
    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        p = self.parameters["blocks.1.attn.q_proj.weight"]
        held = self.optimizer.state[p].get("exp_avg")
        before = torch.zeros(()) if held is None else held.scale[0].clone()
        record = super().step(batch, norms=norms)
        self.optimizer.state[p]["exp_avg"].scale[0] = before
        return record


class BlockScaleStale(TorchBackend):
    """8-bit moments: one block of 256 gets its new codes and keeps the scale of the step before."""

    session_class = _StaleScaleSession


class _FlippedSession(TorchSession):
    STEP = 3

    def step(self, batch: Batch, *, norms: bool = False) -> StepRecord:
        # Only in a step whose gradients are read: a check runs other steps as well.
        shown = self._show_step and not self.__dict__.get("_flipped")
        self._flip = self.steps_done + 1 == self.STEP and shown
        record = super().step(batch, norms=norms)
        self._flipped, self._flip = self.__dict__.get("_flipped") or self._flip, False
        return record

    def accumulate(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        result = super().accumulate(batch)
        if self.__dict__.get("_flip"):
            grad = self.parameters["blocks.1.attn.k_proj.weight"].grad
            assert grad is not None
            # Flip the lowest exponent bit of the largest element, which doubles or halves it.
            flat = grad.view(-1)
            at = int(flat.abs().argmax())
            flat[at] = (flat[at : at + 1].view(torch.int32) ^ (1 << 23)).view(torch.float32)[0]
        return result


class OneBitFlips(TorchBackend):
    """Hardware: in step 3 one bit of one gradient of the second block flips, once and never again."""

    session_class = _FlippedSession
