"""The numerics that a candidate may choose, each with its usual choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.groups import update_rules
from lockstep.core.train import schedule
from lockstep.torch_backend import optim
from lockstep.torch_backend.candidate.layout import Fused, Layout, layout_of
from lockstep.torch_backend.candidate.taps import Where
from lockstep.torch_backend.device import resolve_device
from lockstep.torch_backend.precision import DTYPES


class Numerics:
    """The declarations of a candidate: how its module is built, named, trained and tapped.

    modules: path of a module of theirs → the canonical name of ours, or several in `fused`; `{i}` stands for the block,
    inside which ours may be called without `blocks.{i}.`. A path may be a parameter's own, where ours is as well
    (`"positions": "position.weight"`). taps: canonical tap → `path`, `path:input` or `path:output`, alone or with a
    function that makes ours of theirs; those follow from `modules` that are the output of a module, or what one reads.
    calls: a function → the taps that its results are, call after call, as RoPE's. taps_keep_bits: whether hooks leave
    the bits of gradients alone; a session is then checked for it.
    """

    modules: Mapping[str, str | Sequence[str] | Fused] = {}
    taps: Mapping[str, Where] = {}
    calls: Mapping[Callable[..., Any], Sequence[str]] = {}
    taps_keep_bits = False

    def build(self, config: RunConfig) -> nn.Module:
        """Build the module, whose weights are overwritten. Raises UserError if a subclass does not define it."""
        raise UserError(f"{type(self).__name__} builds no model: write build(self, config)")

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Return logits (B, S, V) of `tokens`, int64 (B, S)."""
        found = model(tokens)
        logits: Tensor = getattr(found, "logits", found)
        return logits

    def losses(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return per-token NLL (B, S), in FP32 at least."""
        logits = self.logits(model, tokens)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)

    def share(self, nll: Tensor, weights: Tensor, total: float, count: int) -> Tensor:
        """Return a micro-batch's part of the step's loss. total: the step's loss weight. count: its micro-batches."""
        return (nll * weights).sum() / total

    def clip(self, config: RunConfig, parameters: Sequence[nn.Parameter]) -> tuple[float, float]:
        """Clip gradients; return their norm before, and what they were multiplied by."""
        limit = config.optim.clip_norm or math.inf
        norm = float(nn.utils.clip_grad_norm_(parameters, limit))
        return norm, min(1.0, limit / (norm + 1e-6))

    def build_optimizer(self, config: RunConfig, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """Build the optimizer; by default torch's AdamW with the run's groups.

        parameters: by canonical name, a fused one by the first of those in it. Raises UserError where an update is not
        one of each number by itself, and a parameter is several of ours or lies otherwise.
        """
        moved = [one.theirs for one in self.layout(config).placed if not one.plain]
        if moved and any(rule.together != 1 for rule in update_rules(config).values()):
            raise UserError(
                f"optim.name = {config.optim.name!r} moves parts of a matrix together, and {moved[0]} is laid out "
                "otherwise: write build_optimizer, or take optim.name = 'adamw'"
            )
        return optim.build_optimizer(config, parameters)

    def learning_rate(self, config: RunConfig, step: int) -> float:
        """Return the rate of a step, from 1; by default the run's schedule. A group's `lr_factor` multiplies it."""
        return schedule.learning_rate(config.optim, step, config.train.steps)

    def precision(self, config: RunConfig) -> AbstractContextManager[Any]:
        """Return the context to build and compute under; by default torch.autocast where operands are narrower."""
        if config.precision.chosen.rounds:
            return torch.autocast(resolve_device(config).type, DTYPES[config.precision.operand])
        return nullcontext()

    def layout(self, config: RunConfig) -> Layout:
        """Return where each canonical parameter lies in the module; by default as in `modules`."""
        return layout_of(self.modules, config.model)

    def taps_of(self, config: RunConfig) -> Mapping[str, Where]:
        """Return the taps of this run; by default `taps`."""
        return self.taps

    def calls_of(self, config: RunConfig) -> Mapping[Callable[..., Any], Sequence[str]]:
        """Return the functions of this run whose results are taps; by default `calls`."""
        return self.calls
