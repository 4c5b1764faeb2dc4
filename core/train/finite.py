"""Losses and gradients that are not finite: such a step changes no weights, and ends the run or is skipped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lockstep.core.backend import StepRecord
from lockstep.core.errors import UserError
from lockstep.core.train.loss_scale import SCALE
from lockstep.core.train.skipped_steps import IN_A_ROW


class NotFinite(UserError):
    """A step whose loss or gradients are not finite. The session's state is that before the step.

    record: the record of the step. where: the first loss or gradient that is not finite, as text.
    """

    def __init__(self, record: StepRecord, where: str) -> None:
        super().__init__(
            f"step {record.step}: loss {record.loss:g}, gradient norm {record.grad_norm:g}: not finite; {where}; "
            "the step was left out"
        )
        self.record, self.where = record, where


def is_finite(record: StepRecord) -> bool:
    """Return whether a step is valid: it is finite, or the session reports that it was skipped."""
    said = SCALE in record.metrics or record.left_out is not None
    return said or (math.isfinite(record.loss) and math.isfinite(record.grad_norm))


def require_progress(record: StepRecord, limit: int) -> None:
    """Raise NotFinite if this step is number `limit` of consecutive skipped steps (`train.skips_in_a_row`)."""
    count = int(record.metrics.get(IN_A_ROW, 0))
    if count >= limit:
        where = record.left_out or "gradients beyond FP16"
        raise NotFinite(record, f"{where}; {count} left out in a row (train.skips_in_a_row = {limit})")


def first_place(loss: float, parameters: Sequence[str], count: int) -> str:
    """Describe the first value of one rank that is not finite; "" if all of its own values are finite.

    loss: the rank's own loss. parameters: names of the parameters whose own gradients are not finite, in the model's
    order. count: number of all parameters.
    """
    if not math.isfinite(loss):
        return f"first in the loss ({loss:g})"
    if not parameters:
        return ""
    on_the_way_back = f"first in the gradient of {parameters[-1]}"
    return on_the_way_back + (f", then of {len(parameters) - 1} more of {count}" if len(parameters) > 1 else "")


def of_ranks(places: Mapping[int, str]) -> str:
    """Join the descriptions of several ranks. places: rank → result of `first_place`."""
    found = [f"on rank {rank} {place}" for rank, place in sorted(places.items()) if place]
    return "; ".join(found) or "on no single rank: it occurs in the sum over ranks"
