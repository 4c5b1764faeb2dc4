"""Gather gradients of several micro-batches separately and together: summed on one rank, or over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lockstep.core.backend import Batch, NotSupported, Session, State
from lockstep.core.capabilities import ShowsRankGradients, StreamsRankGradients, Take, ask
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence.evidence import Accumulation
from lockstep.core.parity.evidence.into_store import gradients_into, put_all
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.evidence.scales import scaled_for_share
from lockstep.core.parity.evidence.store import Store
from lockstep.core.streams import GRADS, stream_gradients
from lockstep.core.train.fp8_amax import layers
from lockstep.core.train.loss_scale import SCALE

# The accumulation check uses the run's number of micro-batches, and at least three. With two shares that are powers of
# two, a mean of means equals the mean.
LEAST_PARTS = 3
# The kind in the store of the sum of their gradients.
SUM = "accumulated/sum"


def accumulate(session: Session, config: RunConfig, before: State, micros: list[Batch], store: Store) -> Accumulation:
    """Compute the gradients of as many micro-batches as a rank has, separately and together.

    Each has the same loss weights times its share, a power of two. The separate gradients are summed with these shares
    at once, and none is kept. With several ranks, the number of micro-batches is not a multiple of the number of ranks,
    so that they are not spread over ranks and a fault of the reduction cannot enter the sum.
    """
    ranks, count = config.train.ranks, max(LEAST_PARTS, config.train.accumulation)
    shares = shares_of(count + 1 if ranks > 1 and count % ranks == 0 else count)
    parts, whole = _of_shares(micros, shares)
    total: Store | None = None
    for number, (part, share) in enumerate(zip(parts, shares, strict=True), 1):
        so_far, total = total, store if number == len(parts) else store.scratch()
        with scaled_for_share(session, config, before, share):
            stream_gradients(session, part, _adding(share, so_far, total))
        if so_far is not None:
            so_far.remove()
    together = gradients_into(store, "accumulated", session, whole)
    return Accumulation((store.arrays(SUM),), (1.0,), together, whole)


def _adding(share: float, so_far: Store | None, total: Store) -> Take:
    """Return a function that puts share · gradient into `total`, plus the sum `so_far` if it is given.

    A gradient that is missing or has another shape is not summed, and the check reports it as missing.
    """
    earlier = None if so_far is None else so_far.arrays(SUM)

    @np.errstate(invalid="ignore", over="ignore")
    def take(kind: str, name: str, gradient: np.ndarray) -> None:
        if kind != GRADS:
            return
        part = gradient.dtype.type(share) * gradient
        if earlier is not None:
            if name not in earlier or earlier[name].shape != part.shape:
                return
            part = earlier[name] + part
        total.put(SUM, name, part)

    return take


def reduce(
    session: Session, config: RunConfig, before: State, micros: list[Batch], missing: list[str], store: Store
) -> Accumulation | None:
    """Compute gradients over ranks, of two micro-batches for each: separately on each rank, and reduced.

    missing: receives the reason if the session cannot do this.
    """
    count = 2 * config.train.ranks
    # All ranks share one loss scale, or one amax history. With either, all shares must be equal.
    one_scale = SCALE in before.scalars or layers(config)
    shares = (1.0 / count,) * count if one_scale else shares_of(count)
    _, whole = _of_shares(micros, shares)
    try:
        with scaled_for_share(session, config, before, shares[0]):
            if store.ranks > 1:
                by_rank = ask(session, StreamsRankGradients).stream_rank_gradients
                by_rank(whole, lambda number, name, gradient: store.put(f"reduced/{number}", name, gradient))
                parts = tuple(store.arrays(f"reduced/{number}") for number in range(count))
            else:
                shown = ask(session, ShowsRankGradients).rank_gradients(whole)
                parts = tuple(put_all(store, f"reduced/{number}", part) for number, part in enumerate(shown))
        return Accumulation(parts, shares, gradients_into(store, "reduced", session, whole), whole)
    except NotSupported as reason:
        missing.append(f"reduced gradients against each rank's own: {reason}")
        return None


def shares_of(count: int) -> tuple[float, ...]:
    """Return `count` powers of two whose sum is 1. The first is a half, and for three or more it is the largest."""
    shares = [0.5, 0.5]
    while len(shares) < count:
        largest = max(range(1, len(shares)), key=shares.__getitem__)
        shares[largest : largest + 1] = [shares[largest] / 2] * 2
    return tuple(shares)


def _of_shares(micros: list[Batch], shares: Sequence[float]) -> tuple[list[Batch], Batch]:
    """Return as many micro-batches as shares, separately and together.

    If there are too few, the first ones are repeated.
    """
    base = uneven_weights(micros[0], 0).weights
    again = micros * (1 + len(shares) // len(micros))
    parts = [
        replace(m, weights=base * np.float32(share)) for m, share in zip(again[: len(shares)], shares, strict=True)
    ]
    return parts, Batch.of({key: np.concatenate([p.arrays[key] for p in parts]) for key in parts[0].arrays})
