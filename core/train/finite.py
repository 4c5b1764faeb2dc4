"""Losses and gradients that are not finite: a step that has them changes nothing, and ends the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lockstep.core.backend import StepRecord
from lockstep.core.errors import UserError
from lockstep.core.train.loss_scale import SCALE
from lockstep.core.train.skipped_steps import IN_A_ROW


class NotFinite(UserError):
    """A step whose loss or gradients are not finite; the session that raises it is as it was before the step.

    record: what the step said of itself. where: in whose loss or gradients it was first, in words.
    """

    def __init__(self, record: StepRecord, where: str) -> None:
        super().__init__(
            f"step {record.step}: loss {record.loss:g}, gradient norm {record.grad_norm:g}: not finite; {where}; "
            "the step was left out"
        )
        self.record, self.where = record, where


def is_finite(record: StepRecord) -> bool:
    """Return whether a step may count: one that is finite, or one that the session reports as left out."""
    said = SCALE in record.metrics or record.left_out is not None
    return said or (math.isfinite(record.loss) and math.isfinite(record.grad_norm))


def require_progress(record: StepRecord, limit: int) -> None:
    """Raise NotFinite if this step is the `limit`th in a row that was left out (`train.skips_in_a_row`)."""
    count = int(record.metrics.get(IN_A_ROW, 0))
    if count >= limit:
        where = record.left_out or "gradients beyond FP16"
        raise NotFinite(record, f"{where}; {count} left out in a row (train.skips_in_a_row = {limit})")


def first_place(loss: float, parameters: Sequence[str], count: int) -> str:
    """Name the first non-finite value of one rank, in words; nothing if all of its own values are finite.

    loss: its own. parameters: names whose own gradients are not finite, in the model's order, of `count`.
    """
    if not math.isfinite(loss):
        return f"first in the loss ({loss:g})"
    if not parameters:
        return ""
    on_the_way_back = f"first in the gradient of {parameters[-1]}"
    return on_the_way_back + (f", then of {len(parameters) - 1} more of {count}" if len(parameters) > 1 else "")


def of_ranks(places: Mapping[int, str]) -> str:
    """Describe where numbers are not finite on several ranks, by rank."""
    found = [f"on rank {rank} {place}" for rank, place in sorted(places.items()) if place]
    return "; ".join(found) or "on no rank by itself: it arose in the sum over ranks"
