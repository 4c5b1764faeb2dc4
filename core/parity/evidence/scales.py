"""Load, while a block runs, scales that suit a micro-batch that is computed alone, as a share of a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from lockstep.core.backend import Batch, Session, State
from lockstep.core.config.schema import RunConfig
from lockstep.core.train.fp8_amax import for_a_share, layers
from lockstep.core.train.loss_scale import SCALE


def scaled_as_in_step(session: Session, config: RunConfig, before: State, batch: Batch) -> AbstractContextManager[None]:
    """Load the scales that suit a micro-batch of the step alone, under a loss scale or FP8's delayed scaling.

    Alone, its gradients are larger than in the step. A loss scale grows until gradients overflow, so that most steps
    are within a factor of two of that: alone, the micro-batch of a healthy step overflows.
    """
    count = len(batch.cut(config.train))
    if count == 1 or not (layers(config) or SCALE in before.scalars):
        return nullcontext()
    # A power of two leaves all roundings as they are.
    share = 1 / count if layers(config) else 2.0 ** -math.ceil(math.log2(count))
    return scaled_for_share(session, config, before, share)


@contextmanager
def scaled_for_share(session: Session, config: RunConfig, before: State, share: float) -> Iterator[None]:
    """Load scales that give a micro-batch alone the gradients that it has as this share of a whole.

    The range of FP16 ends at both sides: under a loss scale, a gradient of twice the size is not rounded alike. Nor is
    it under FP8's delayed scaling, whose scales are made for the gradients of a whole step.
    """
    scalars = for_a_share(config, before.scalars, share)
    if SCALE in scalars:
        scalars[SCALE] *= share
    if scalars == before.scalars:
        yield
        return
    session.load(replace(before, scalars=scalars))
    try:
        yield
    finally:
        session.load(before)
