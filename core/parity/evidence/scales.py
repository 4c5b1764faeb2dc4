"""Load, for a `with` block, the scales for a micro-batch that is computed separately as a share of a whole."""

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
    """Load the scales for separate micro-batches of the step, under a loss scale or FP8's delayed scaling.

    A separate micro-batch has larger gradients than in the step. A loss scale grows until gradients overflow, so most
    steps are within a factor of two of overflow, and a separate micro-batch of a healthy step would overflow.
    """
    count = len(batch.cut(config.train))
    if count == 1 or not (layers(config) or SCALE in before.scalars):
        return nullcontext()
    # A power of two does not change roundings.
    share = 1 / count if layers(config) else 2.0 ** -math.ceil(math.log2(count))
    return scaled_for_share(session, config, before, share)


@contextmanager
def scaled_for_share(session: Session, config: RunConfig, before: State, share: float) -> Iterator[None]:
    """Load scales that give a separate micro-batch the gradients that it has with this share of the loss weight.

    FP16 has a limited range, so under a loss scale a gradient of twice the size has other roundings. Under FP8's
    delayed scaling too, because the scales are those of a whole step's gradients.
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
