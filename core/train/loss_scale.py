"""Dynamic loss scaling for FP16, as in `torch.amp.GradScaler`, as a pure function of the steps so far.

FP16 has no number between 0 and 2⁻²⁴, so small gradients would become 0. The loss, and with it every gradient, is
multiplied by a power of two before the backward pass, and gradients are divided by it before clipping (Micikevicius et
al. 2018, arXiv 1710.03740). A step whose gradients are not finite is skipped, and the scale halves. After
`precision.loss_scale_interval` finite steps in a row the scale doubles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from lockstep.core.config.schema import PrecisionConfig

GROWTH, BACKOFF = 2.0, 0.5
SCALE, FINITE, SKIPPED = "loss_scale", "finite_steps", "skipped_steps"


def first_scale(precision: PrecisionConfig) -> dict[str, float]:
    """Return the scalars of a run's state before its first step; {} unless the policy is fp16."""
    return {SCALE: precision.loss_scale, FINITE: 0.0, SKIPPED: 0.0} if precision.chosen.scaled else {}


def scale_after(scalars: Mapping[str, float], finite: bool, interval: int) -> dict[str, float]:
    """Return the scalars after a step.

    finite: the step's gradients are finite. interval: finite steps in a row after which the scale doubles.
    """
    if not scalars:
        return {}
    if not finite:
        return {SCALE: scalars[SCALE] * BACKOFF, FINITE: 0.0, SKIPPED: scalars[SKIPPED] + 1}
    count = scalars[FINITE] + 1
    if count < interval:
        return {SCALE: scalars[SCALE], FINITE: count, SKIPPED: scalars[SKIPPED]}
    grown = scalars[SCALE] * GROWTH
    # A scale beyond FP32 would make every gradient infinite.
    return {SCALE: grown if math.isfinite(grown) and grown < 2.0**127 else scalars[SCALE], FINITE: 0.0} | {
        SKIPPED: scalars[SKIPPED]
    }
