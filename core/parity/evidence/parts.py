"""Observe the gradients of a step's micro-batches: the contribution of each to the step, or each computed separately.

Sketches are linear. The sum of the sketches of all contributions is the sketch of the step's accumulated gradient.
Sketches of separate micro-batches are summed with their shares of the loss weight. So the comparison of a step with its
micro-batches takes some kilobytes a tensor, and no gradient leaves the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lockstep.core.backend import Arrays, Batch, NotSupported, Session, State
from lockstep.core.capabilities import ShowsParts, SketchesGradients, StreamsRankGradients, ask, ask_stream, ranks_of
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence.amaxes import amaxes_of_pass
from lockstep.core.parity.evidence.observations import PARAMETER, Observation, observed
from lockstep.core.parity.evidence.scales import scaled_as_in_step
from lockstep.core.streams import GRADS, stream_gradients
from lockstep.core.train.fp8_amax import layers

Observations = Mapping[str, Observation]


def has_parts(config: RunConfig, batch: Batch) -> bool:
    """Return whether a step on `batch` has several micro-batches.

    For a single one, the step's own gradients suffice.
    """
    return config.train.accumulation * config.train.ranks > 1 and len(batch.cut(config.train)) > 1


def parts_of_step(session: Session, config: RunConfig) -> ShowsParts | None:
    """Return the session if its step shows the contribution of each micro-batch; None if not, or with several ranks."""
    try:
        return ask(session, ShowsParts) if config.train.ranks == 1 else None
    except NotSupported:
        return None


def observed_parts(session: Session, config: RunConfig, batch: Batch) -> list[Observations]:
    """Return observations of the gradients of each micro-batch of `batch`, in order, by `gradient/PARAMETER`.

    With several ranks each computes its own micro-batches, and rank 0 receives those of all. Every rank calls it.
    Raises NotSupported if the session gives no gradients.
    """
    if config.train.ranks == 1:
        return [sketched(session, micro) for micro in batch.cut(config.train)]
    mine: dict[int, dict[str, Observation]] = {}

    def take(number: int, name: str, gradient: np.ndarray) -> None:
        mine.setdefault(number, {})[PARAMETER + name] = observed(gradient)

    ask(session, StreamsRankGradients).stream_rank_gradients(batch, take)
    of_all = ranks_of(session).gather(mine, "`observe the gradients of each micro-batch`")
    together = {number: found for of_rank in of_all for number, found in of_rank.items()}
    return [together[number] for number in sorted(together)]


def parts_apart(
    session: Session, config: RunConfig, before: State, batch: Batch, missing: list[str]
) -> tuple[tuple[Mapping[str, Observation], ...], tuple[Arrays, ...]]:
    """Observe gradients, and amaxes if there are any, of each of the step's micro-batches in separate passes."""
    try:
        with scaled_as_in_step(session, config, before, batch):
            if config.train.ranks > 1 or not layers(config):
                return tuple(observed_parts(session, config, batch)), ()
            parts = [(sketched(session, one), amaxes_of_pass(session, config, [])) for one in batch.cut(config.train)]
            return tuple(seen for seen, _ in parts), tuple(amaxes for _, amaxes in parts if amaxes)
    except NotSupported as reason:
        missing.append(f"the step's gradients against those of its micro-batches: {reason}")
        return (), ()


def sketched(session: Session, micro: Batch) -> Observations:
    """Return the observations of the gradients of a micro-batch by `gradient/PARAMETER`.

    Raises NotSupported if the session gives no gradients.
    """
    try:
        sketches = ask_stream(session, SketchesGradients, "gradients")
    except NotSupported:
        found: dict[str, Observation] = {}

        def take(kind: str, name: str, gradient: np.ndarray) -> None:
            if kind == GRADS:
                found[PARAMETER + name] = observed(gradient)

        stream_gradients(session, micro, take)
        return found
    return sketches.sketch_gradients(micro)
