"""Steps that are skipped because they are not finite, and their counts in a state.

With `train.on_not_finite = "skip"`, such a step changes neither weights nor moments, but the step number increases. The
counts are scalars of the state, because AdamW's bias correction needs the number of updates (`State.updates`), also
after a resume. Under fp16, loss scaling skips steps with any value of the setting (core/train/loss_scale.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from lockstep.core.backend import State
from lockstep.core.config.schema import RunConfig
from lockstep.core.train.fp8_amax import Amaxes, amaxes_after, first_amaxes
from lockstep.core.train.loss_scale import SCALE, SKIPPED, first_scale, scale_after

# Number of consecutive skipped steps, up to the last step; it exists only if it may end the run.
IN_A_ROW = "skipped_in_a_row"


def leaves_out(config: RunConfig) -> bool:
    """Return whether a step that is not finite is skipped and counted; else it raises NotFinite."""
    return config.precision.chosen.scaled or config.train.on_not_finite == "skip"


def is_made(config: RunConfig, loss: float, grad_norm: float) -> bool:
    """Return whether a step with this loss and gradient norm updates weights; under fp16, only the norm counts."""
    return math.isfinite(grad_norm) and (config.precision.chosen.scaled or math.isfinite(loss))


def first_scalars(config: RunConfig) -> dict[str, float]:
    """Return the scalars of a run's state before its first step."""
    counts = {SKIPPED: 0.0, IN_A_ROW: 0.0} if config.train.on_not_finite == "skip" else {}
    return first_scale(config.precision) | counts | first_amaxes(config)


def own_scalars(config: RunConfig, scalars: Mapping[str, float]) -> dict[str, float]:
    """Return the scalars that a session of `config` takes from a state: its own, and the number of skipped steps."""
    first = first_scalars(config)
    kept = {name: value for name, value in scalars.items() if name in first or name == SKIPPED}
    return first | kept


def as_its_own(config: RunConfig, state: State) -> State:
    """Return a state with the scalars of a session of `config`, which may have another precision policy."""
    return replace(state, scalars=own_scalars(config, state.scalars))


def scalars_after(
    config: RunConfig, scalars: Mapping[str, float], made: bool, seen: Amaxes | None = None
) -> dict[str, float]:
    """Return the scalars after a step. made: it was not skipped. seen: its amaxes under FP8's delayed scaling."""
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
