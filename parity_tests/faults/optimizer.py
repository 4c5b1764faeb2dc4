"""Faults between accumulated gradients and new weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from core.backend import Batch, StepRecord
from torch_backend.session import TorchBackend, TorchSession


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
    """β₂ = 0.999 where the configuration says 0.95."""

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
