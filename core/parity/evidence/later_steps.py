"""Repeat a run's first step as a later step, to find faults that depend on the step's number before they occur.

`lockstep parity` checks the first steps, in which most schedules warm up. A schedule that never decays is wrong
hundreds of steps later. The last of the repeated steps has weights so small that the norm of its gradients is below
`optim.clip_norm`, as in later steps. In a first step the norm is mostly above it. Both start with the counts of a long
run: a loss scale before its next growth, and a full amax history.

A record shows only what a session reports. To compare the update with the reference too, a part of each parameter's
gradient is kept, and of its moments and weights after the step. Each later step is also repeated as the second step of
the run, because loss and gradients of a model do not depend on the step's number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lockstep.core.arrays import Scaled
from lockstep.core.backend import Arrays, Batch, NotSupported, RankReport, Session, State, StepRecord, in_words
from lockstep.core.capabilities import Loads, ReportsRanks, ask, ranks_of
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.names import parameter_shapes
from lockstep.core.parity.evidence.in_a_row import (
    ALIKE,
    ARITHMETIC,
    AS_LATER,
    AS_STEP,
    LAST_WRITTEN,
    ON_RANK,
    are_far_apart,
    differing_numbers,
    on_any,
)
from lockstep.core.parity.evidence.round_trip import differs_once_read
from lockstep.core.parity.evidence.store import Store
from lockstep.core.parity.measures.drawn_part import parts_of_all
from lockstep.core.run.ranks import Ranks, rows_of_rank
from lockstep.core.streams import GRADS, PROGRAM, StreamStep, stream_gradients, stream_state, with_tensors
from lockstep.core.train.finite import NotFinite
from lockstep.core.train.fp8_amax import CASTS, key, layers
from lockstep.core.train.loss_scale import FINITE
from lockstep.core.train.schedule import decay_steps
from lockstep.core.train.unchanged_state import differing

# A power of two. With weights scaled by it, logits are close to zero, and gradients shrink by about the same factor.
SMALL = 2.0**-10
# Fields of a record that are the same on every rank.
OF_EVERY_RANK = (*ARITHMETIC[1:], "step")
# Share of the decay that is left after the tested step. At the middle, a cosine and a line give the same rate.
SHARE = 0.4


@dataclass(frozen=True)
class Moved:
    """Gradients, weights and moments of a later step: the part of each parameter that `parts_of_all` draws.

    number: number of the step.
    grads: its gradients.
    after: weights and moments after it.
    """

    number: int
    grads: Arrays
    after: State


def numbers(config: RunConfig) -> list[int]:
    """Return the numbers of the tested steps: one within the decay of the learning rate, and the last."""
    last = config.train.steps
    return sorted({n for n in (last - round(SHARE * decay_steps(config.optim, last)), last) if n > 1})


def as_later_steps(records: Sequence[StepRecord], config: RunConfig) -> dict[str, tuple[int, StepRecord]]:
    """Return suffix of its taps (`/200`) → number and record of each later step."""
    return {f"/{number}": (number, record) for number, record in zip(numbers(config), records, strict=False)}


def state_before(after: State, number: int, config: RunConfig) -> State:
    """Return the state before a later step. after: the state after the first step.

    FP16's loss scale is one step before its growth. FP8's amax history is full; older amaxes are smaller, so that the
    scales do not change.
    """
    params = Scaled(after.params, SMALL) if number == config.train.steps else after.params
    scalars, length = dict(after.scalars), config.precision.fp8_history
    if FINITE in scalars:
        scalars[FINITE] = config.precision.loss_scale_interval - 1.0
    for layer in layers(config):
        for cast in CASTS:
            newest = scalars.get(key(layer, cast, 0), 0.0)
            for age in range(1, length):
                scalars[key(layer, cast, age)] = float(np.float32(newest * (1 - age / (2 * length))))
    return replace(after, step=number - 1, params=params, scalars=scalars)


@dataclass(frozen=True)
class Later:
    """The results of a run's first step, repeated as later steps.

    records: one for each of `numbers`.
    moved: gradients, and weights and moments after each step.
    compared: key of core/parity/evidence/in_a_row.py → names of differences. AS_LATER: of the records from those of the
    same steps as the second of the run. LAST_WRITTEN: of the state after the last step, after it was written and read.
    ALIKE: between ranks.
    """

    records: tuple[StepRecord, ...] = ()
    moved: tuple[Moved, ...] = ()
    compared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def later_steps(
    session: Session,
    config: RunConfig,
    batch: Batch,
    after: State,
    store: Store,
    in_passing: StreamStep | None,
    missing: list[str],
) -> Later:
    """Repeat the first step with each of `numbers`, and write the checkpoint of the last.

    after: the state after the first step. Each later step begins with it, and the session has it again at the end. If
    it is the state after another step, nothing is done.
    in_passing: the session's step if it shows its gradients; otherwise they are computed before it.
    missing: receives, in words, what could not be done.
    Every rank calls it.
    """
    if after.step != 1:
        return Later()
    load, ranks = ask(session, Loads).load, ranks_of(session)
    records: list[StepRecord] = []
    moved: list[Moved] = []
    compared: dict[str, tuple[str, ...]] = {}
    try:
        for number in numbers(config):
            load(state_before(after, number, config))
            record, found = _made(session, batch, number, TakesParts(store, config, number, ranks), in_passing)
            records.append(record)
            unlike = _unlike(session) if config.train.ranks > 1 else None
            if found is not None:
                moved.append(found)
            else:
                missing.append(f"moments and update of step {number:,}: the session's step did not show its gradients")
            if number == config.train.steps:
                compared |= _rewritten(session, number, after, missing)

            def as_second(number: int = number) -> StepRecord:
                load(replace(state_before(after, number, config), step=after.step))
                return session.step(batch)

            differ = _differ(record, as_second, ranks, missing)
            for key, wrong in ((ALIKE, unlike), (AS_LATER, differ)):
                if wrong is not None:
                    compared[key] = (*compared.get(key, ()), *(f"{name}{AS_STEP}{number}" for name in wrong))
    except Exception as reason:
        # As for two steps in a row (core/parity/evidence/in_a_row.py).
        if config.train.ranks > 1 and not isinstance(reason, (NotSupported, NotFinite)):
            raise
        missing.append(f"loss, gradients, scalars and update of later steps: {in_words(reason)}")
    load(after)
    return Later(tuple(records), tuple(moved), compared)


def _unlike(session: Session) -> tuple[str, ...] | None:
    """Return the names of differences of other ranks from rank 0 after a step; None if they do not report."""
    try:
        first, *others = ask(session, ReportsRanks).rank_reports()
    except NotSupported:  # the step's own check lacks the reports too, and lists this
        return None
    return tuple(f"{name}{ON_RANK}{rank}" for rank, one in enumerate(others, 1) for name in _apart(first, one))


def _apart(first: RankReport, other: RankReport) -> Iterator[str]:
    yield from differing_numbers(first.record, other.record, OF_EVERY_RANK)
    yield from (f"{GRADS}/{name}" for name in differing(first.gradients, other.gradients))
    yield from differing(first.state, other.state)


def _differ(
    record: StepRecord, as_second: Callable[[], StepRecord], ranks: Ranks, missing: list[str]
) -> tuple[str, ...]:
    """Return the fields in which a record differs from that of the same step as the second of the run."""
    second = as_second()
    found = on_any(ranks, differing_numbers(record, second))
    if not found:
        return ()
    again = as_second()
    far = on_any(ranks, ("record",) * any(are_far_apart(record, one) for one in (second, again)))
    if on_any(ranks, differing_numbers(second, again)) and not far:
        missing.append("loss and gradients of later steps: the session's steps do not repeat their bits")
        return ()
    return found


def _rewritten(session: Session, number: int, after: State, missing: list[str]) -> dict[str, tuple[str, ...]]:
    try:
        return {LAST_WRITTEN: on_any(ranks_of(session), differs_once_read(session, number, after))}
    except (NotSupported, ValueError, KeyError) as reason:  # as in the round trip of the first step's state
        missing.append(f"the checkpoint of the last step: {in_words(reason)}")
        return {}


class TakesParts:
    """A function that puts a part of each tensor into the store; with several ranks, this rank's rows of the part."""

    def __init__(self, store: Store, config: RunConfig, number: int, ranks: Ranks) -> None:
        self._store, self._name, self._ranks = store, f"later/{number}", ranks
        self._kept, self._shapes = parts_of_all(config, number - 1), parameter_shapes(config.model)

    def __call__(self, kind: str, tensor: str, array: np.ndarray) -> None:
        """Put the part of a whole tensor, or of this rank's rows."""
        if tensor not in self._kept or kind == PROGRAM:
            return
        where, shape, whole = *self._kept[tensor], self._shapes[tensor]
        held = slice(0, whole[0])
        if array.shape[0] != whole[0]:
            held = rows_of_rank(whole[0], self._ranks.rank, self._ranks.count)
        row = math.prod(whole[1:])
        first, last = (min(max(at - held.start * row, 0), array.size) for at in (where.start, where.stop))
        # A view would keep the whole array in memory.
        self._store.put(f"{self._name}/{kind}", tensor, array.reshape(-1)[first:last].reshape(-1, *shape[1:]).copy())

    def arrays(self, kind: str) -> Arrays:
        """Return the stored tensors of a kind."""
        return self._store.arrays(f"{self._name}/{kind}")


def _made(
    session: Session, batch: Batch, number: int, take: TakesParts, in_passing: StreamStep | None
) -> tuple[StepRecord, Moved | None]:
    if in_passing is not None:
        record, found = in_passing(batch, take, False)
        if found is None:
            return record, None
    else:
        stream_gradients(session, batch, take)
        record = session.step(batch)
    return record, Moved(number, take.arrays(GRADS), with_tensors(stream_state(session, take), take.arrays))
