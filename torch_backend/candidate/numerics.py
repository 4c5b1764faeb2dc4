"""The parts of a training step that a candidate may define, each with a default."""

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

    modules: path in the candidate's module → canonical name, or several names in `fused`. `{i}` is the block's number;
    inside a block, canonical names may omit `blocks.{i}.`. A path may also be a parameter, mapped to a canonical
    parameter (`"positions": "position.weight"`).

    taps: canonical tap → `path`, `path:input` or `path:output`, alone or with a function that converts the candidate's
    tensor into the canonical one. Taps that are the input or the output of a mapped module follow from `modules`.

    calls: function → the taps that its results are, one call after another, as for RoPE.

    taps_keep_bits: hooks do not change the bits of gradients. A check then tests this.
    """

    modules: Mapping[str, str | Sequence[str] | Fused] = {}
    taps: Mapping[str, Where] = {}
    calls: Mapping[Callable[..., Any], Sequence[str]] = {}
    taps_keep_bits = False

    def build(self, config: RunConfig) -> nn.Module:
        """Build the module; its weights are overwritten. Raises UserError unless a subclass defines this method."""
        raise UserError(f"{type(self).__name__} builds no model: write build(self, config)")

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Return logits (B, S, V) of `tokens`, int64 (B, S)."""
        found = model(tokens)
        logits: Tensor = getattr(found, "logits", found)
        return logits

    def losses(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return per-token negative log-likelihood (B, S) in nats, in FP32 or wider."""
        logits = self.logits(model, tokens)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)

    def share(self, nll: Tensor, weights: Tensor, total: float, count: int) -> Tensor:
        """Return a micro-batch's part of the step's loss, a scalar.

        nll, weights: (B, S). total: sum of the loss weights of the step. count: number of micro-batches of the step.
        """
        return (nll * weights).sum() / total

    def clip(self, config: RunConfig, parameters: Sequence[nn.Parameter]) -> tuple[float, float]:
        """Clip gradients in place; return their norm before clipping, and the factor."""
        limit = config.optim.clip_norm or math.inf
        norm = float(nn.utils.clip_grad_norm_(parameters, limit))
        return norm, min(1.0, limit / (norm + 1e-6))

    def build_optimizer(self, config: RunConfig, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """Build the optimizer; by default torch's optimizer with the run's settings and parameter groups.

        parameters: by canonical name; a fused parameter has the first of its canonical names. Raises UserError if the
        update rule is not element-wise and a parameter is fused or has another layout.
        """
        moved = [one.theirs for one in self.layout(config).placed if not one.plain]
        if moved and any(rule.together != 1 for rule in update_rules(config).values()):
            raise UserError(
                f"optim.name = {config.optim.name!r} updates parts of a matrix together, and {moved[0]} has another "
                "layout: write build_optimizer, or take optim.name = 'adamw'"
            )
        return optim.build_optimizer(config, parameters)

    def learning_rate(self, config: RunConfig, step: int) -> float:
        """Return the learning rate of a step, counted from 1; by default that of the run's schedule.

        A group's `lr_factor` multiplies it.
        """
        return schedule.learning_rate(config.optim, step, config.train.steps)

    def precision(self, config: RunConfig) -> AbstractContextManager[Any]:
        """Return the context in which the module is built and run; by default torch.autocast if the policy rounds."""
        if config.precision.chosen.rounds:
            return torch.autocast(resolve_device(config).type, DTYPES[config.precision.operand])
        return nullcontext()

    def layout(self, config: RunConfig) -> Layout:
        """Return the place of each canonical parameter in the module; by default from `modules`."""
        return layout_of(self.modules, config.model)

    def taps_of(self, config: RunConfig) -> Mapping[str, Where]:
        """Return the taps of this run; by default `taps`."""
        return self.taps

    def calls_of(self, config: RunConfig) -> Mapping[Callable[..., Any], Sequence[str]]:
        """Return the functions of this run whose results are taps; by default `calls`."""
        return self.calls
