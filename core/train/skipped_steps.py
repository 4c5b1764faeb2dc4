"""Steps that are left out because they are not finite: when, and what a state counts of them.

`train.on_not_finite = "skip"` leaves weights and moments as they were; only the number of the step goes on. The counts
are scalars of the state, because AdamW's bias correction counts updates (`State.updates`), also after a resume. Under
fp16 the loss scale leaves steps out by itself (core/train/loss_scale.py), whatever the setting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from lockstep.core.backend import State
from lockstep.core.config.schema import RunConfig
from lockstep.core.train.fp8_amax import Amaxes, amaxes_after, first_amaxes
from lockstep.core.train.loss_scale import SCALE, SKIPPED, first_scale, scale_after

# Consecutive steps that were left out, up to the last one; counted only where their number may end the run.
IN_A_ROW = "skipped_in_a_row"


def leaves_out(config: RunConfig) -> bool:
    """Return whether a step that is not finite is left out and counted; else it raises NotFinite."""
    return config.precision.chosen.scaled or config.train.on_not_finite == "skip"


def is_made(config: RunConfig, loss: float, grad_norm: float) -> bool:
    """Return whether a step with this loss and gradient norm may change anything. FP16 needs only finite gradients."""
    return math.isfinite(grad_norm) and (config.precision.chosen.scaled or math.isfinite(loss))


def first_scalars(config: RunConfig) -> dict[str, float]:
    """Return the scalars of a run's state before its first step."""
    counts = {SKIPPED: 0.0, IN_A_ROW: 0.0} if config.train.on_not_finite == "skip" else {}
    return first_scale(config.precision) | counts | first_amaxes(config)


def own_scalars(config: RunConfig, scalars: Mapping[str, float]) -> dict[str, float]:
    """Return the scalars that a session of `config` takes from a state: those that it counts, and updates left out."""
    first = first_scalars(config)
    kept = {name: value for name, value in scalars.items() if name in first or name == SKIPPED}
    return first | kept


def as_its_own(config: RunConfig, state: State) -> State:
    """Return a state with the scalars of a session of `config`: under another precision policy, or without a scale."""
    return replace(state, scalars=own_scalars(config, state.scalars))


def scalars_after(
    config: RunConfig, scalars: Mapping[str, float], made: bool, seen: Amaxes | None = None
) -> dict[str, float]:
    """Return the scalars after a step that was made or left out. seen: its amaxes under FP8's delayed scaling."""
    after = dict(scalars)
    if made and seen:
        after |= amaxes_after(config, scalars, seen)
    if SCALE in scalars:
        after |= scale_after(scalars, made, config.precision.loss_scale_interval)
    elif SKIPPED in scalars:
        after[SKIPPED] += not made
    if IN_A_ROW in scalars:
        after[IN_A_ROW] = 0.0 if made else scalars[IN_A_ROW] + 1
    return after
