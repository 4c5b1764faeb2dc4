"""Compare each record of a run with the values that settings and batch prescribe. This needs no reference.

It finds a wrong learning rate, and a session that uses only a part of its batch, at the first wrong step, also between
two checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lockstep.core.backend import Batch, StepRecord
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.parity.measures import scalar_bounds
from lockstep.core.run.ranks import ONE, Ranks
from lockstep.core.train.schedule import learning_rate


class WrongRecord(UserError):
    """A step's record differs from the values that the run prescribes for the step."""


def require_prescribed(record: StepRecord, batch: Batch, step: int, config: RunConfig, ranks: Ranks = ONE) -> None:
    """Raise WrongRecord unless the record of step `step` matches the settings and the step's batch.

    It compares the step's number, the batch's digest, its number of tokens and its loss weight, the learning rate, and
    the clip coefficient for the norm in the record. Bounds are those of a check (scalar_bounds.py). Every rank calls it
    with its own record, and every rank raises if the record of any rank is wrong.
    """
    found = ranks.gather("; ".join(_wrong(record, batch, step, config)), f"`compare the records of step {step}`")
    for rank, wrong in enumerate(found):
        if wrong:
            where = f" on rank {rank}" if ranks.count > 1 else ""
            raise WrongRecord(f"step {step}: its record{where} does not follow from the run: {wrong}")


def _wrong(record: StepRecord, batch: Batch, step: int, config: RunConfig) -> Iterator[str]:
    if record.step != step:
        yield f"it is the record of step {record.step}"
    if record.digest != batch.digest():
        yield "the digest of the batch is not that of the batch that the session got"
    if record.tokens != batch.targets.size:
        yield f"tokens {record.tokens:,}, where the batch has {batch.targets.size:,} targets"
    weight = float(batch.weights.sum(dtype=np.float64))
    ulps = scalar_bounds.ulps(record.loss_weight, weight, np.dtype(np.float32))
    if not ulps <= scalar_bounds.sum_bound(batch.weights.size)[0]:
        yield f"loss_weight {record.loss_weight:.9g}, where the batch weighs {weight:.9g}"
    lr = learning_rate(config.optim, step, config.train.steps)
    if not scalar_bounds.learning_rate(record.lr, lr).ok:
        yield f"lr {record.lr:.9g}, where the schedule has {lr:.9g}"
    if math.isfinite(record.grad_norm):
        dtype: np.dtype[np.floating] = np.dtype(np.float64 if config.precision.exact else np.float32)
        if not scalar_bounds.clip_coefficient(record.clip_coefficient, record.grad_norm, config.optim, dtype).ok:
            yield (
                f"clip_coefficient {record.clip_coefficient:.9g} for a gradient norm of {record.grad_norm:.9g} and "
                f"optim.clip_norm = {config.optim.clip_norm:g}"
            )
