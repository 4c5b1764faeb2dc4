"""A run's first step as a later one of the run: what depends on the step's number alone is seen before it comes.

`lockstep parity` checks the first steps, in which a schedule mostly warms up; one that never decays is wrong hundreds
of steps later. The last of them is made with weights so small that its gradients are shorter than `optim.clip_norm`,
as those of later steps are: in a first step they are mostly longer.

Records say what a session means to do. So that what it does is held to the reference as well, a part of each
parameter's gradient, and of its moments and weights after the step, is kept. Each later step is also made once more as
the second step of the run: loss and gradients of a model do not depend on the step's number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lockstep.core.arrays import Scaled
from lockstep.core.backend import Arrays, Batch, NotSupported, Session, State, StepRecord, in_words
from lockstep.core.capabilities import Loads, Take, ask
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.graph import Shape
from lockstep.core.parity.evidence.in_a_row import (
    AS_LATER,
    AS_STEP,
    LAST_WRITTEN,
    are_far_apart,
    differing_numbers,
)
from lockstep.core.parity.evidence.round_trip import differs_once_read
from lockstep.core.parity.evidence.store import Store
from lockstep.core.parity.measures.drawn_part import parts_of_all
from lockstep.core.streams import GRADS, PROGRAM, StreamStep, stream_gradients, stream_state, with_tensors
from lockstep.core.train.finite import NotFinite
from lockstep.core.train.schedule import decay_steps

# A power of two. Logits of such weights are next to nothing, and gradients are smaller than they were by about as much.
SMALL = 2.0**-10
# The share of the decay that is left after the step that is tried. In the middle a cosine has a straight line's rate.
SHARE = 0.4


@dataclass(frozen=True)
class Moved:
    """Hold gradients, weights and moments of a later step: of each parameter, the part that `parts_of_all` draws.

    number: of the step. grads: its gradients. after: weights and moments after it.
    """

    number: int
    grads: Arrays
    after: State


def numbers(config: RunConfig) -> list[int]:
    """Return the steps that are tried: one within the decay of the learning rate, and the last."""
    last = config.train.steps
    return sorted({n for n in (last - round(SHARE * decay_steps(config.optim, last)), last) if n > 1})


def as_later_steps(records: Sequence[StepRecord], config: RunConfig) -> dict[str, tuple[int, StepRecord]]:
    """Return the number and record of each later step, by what is added to the names of its taps: `/200`."""
    return {f"/{number}": (number, record) for number, record in zip(numbers(config), records, strict=False)}


def state_before(after: State, number: int, config: RunConfig) -> State:
    """Return the state that a later step begins with. after: the state after the first step."""
    params = Scaled(after.params, SMALL) if number == config.train.steps else after.params
    return replace(after, step=number - 1, params=params)


@dataclass(frozen=True)
class Later:
    """Hold what came of a run's first step as later ones.

    records: of each of `numbers`. moved: what they moved. compared: names of what differs, as in
    core/parity/evidence/in_a_row.py: AS_LATER, of their records from those of the same steps as the second of the run;
    LAST_WRITTEN, of the state after the last, once that was written and read back.
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
    """Make the first step again as each of `numbers`, and write the checkpoint of the last.

    after: the state after the first step. Each later step begins with it, and the session has it again at the end. If
    it is the state after another step, nothing is done. in_passing: the session's step, if that shows its gradients;
    otherwise they are computed before it. `missing` gets, in words, what could not be done. Every rank calls it;
    several ranks make the later steps, and nothing else.
    """
    if after.step != 1:
        return Later()
    load = ask(session, Loads).load
    records: list[StepRecord] = []
    moved: list[Moved] = []
    compared: dict[str, tuple[str, ...]] = {}
    if config.train.ranks > 1:
        missing.append("moments, update and checkpoint of later steps: with one rank alone")
    try:
        for number in numbers(config):
            load(state_before(after, number, config))
            if config.train.ranks > 1:
                records.append(session.step(batch))
                continue
            record, found = _made(session, batch, number, store, parts_of_all(config, number - 1), in_passing)
            records.append(record)
            if found is not None:
                moved.append(found)
            else:
                missing.append(f"moments and update of step {number:,}: the session's step did not show its gradients")
            if number == config.train.steps:
                compared |= _rewritten(session, number, after, missing)

            def as_second(number: int = number) -> StepRecord:
                load(replace(state_before(after, number, config), step=after.step))
                return session.step(batch)

            wrong = _differ(record, as_second, missing)
            compared[AS_LATER] = (*compared.get(AS_LATER, ()), *(f"{name}{AS_STEP}{number}" for name in wrong))
    except Exception as reason:
        # As in two steps in a row (core/parity/evidence/in_a_row.py).
        if config.train.ranks > 1 and not isinstance(reason, (NotSupported, NotFinite)):
            raise
        missing.append(f"loss, gradients, scalars and update of later steps: {in_words(reason)}")
    load(after)
    return Later(tuple(records), tuple(moved), compared)


def _differ(record: StepRecord, as_second: Callable[[], StepRecord], missing: list[str]) -> tuple[str, ...]:
    """Name the fields in which a record is not that of the same step, made as the second of the run."""
    second = as_second()
    found = differing_numbers(record, second)
    if not found:
        return ()
    again = as_second()
    far = any(are_far_apart(record, one) for one in (second, again))
    if differing_numbers(second, again) and not far:
        missing.append("loss and gradients of later steps: the session's steps do not repeat their bits")
        return ()
    return found


def _rewritten(session: Session, number: int, after: State, missing: list[str]) -> dict[str, tuple[str, ...]]:
    try:
        return {LAST_WRITTEN: differs_once_read(session, number, after)}
    except (NotSupported, ValueError, KeyError) as reason:  # as in the round trip of the first step's state
        missing.append(f"the checkpoint of the last step: {in_words(reason)}")
        return {}


def _made(
    session: Session,
    batch: Batch,
    number: int,
    store: Store,
    kept: Mapping[str, tuple[slice, Shape]],
    in_passing: StreamStep | None,
) -> tuple[StepRecord, Moved | None]:
    take, shown = _taking(store, f"later/{number}", kept), True
    if in_passing is not None:
        record, found = in_passing(batch, take, False)
        shown = found is not None
    else:
        stream_gradients(session, batch, take)
        record = session.step(batch)
    if not shown:
        return record, None
    after = with_tensors(stream_state(session, take), lambda kind: store.arrays(f"later/{number}/{kind}"))
    return record, Moved(number, store.arrays(f"later/{number}/{GRADS}"), after)


def _taking(store: Store, name: str, kept: Mapping[str, tuple[slice, Shape]]) -> Take:
    """Return what puts the part of a tensor that is kept into the store."""

    def take(kind: str, tensor: str, array: np.ndarray) -> None:
        if tensor in kept and kind != PROGRAM:
            where, shape = kept[tensor]
            # A view would hold the whole array.
            store.put(f"{name}/{kind}", tensor, array.reshape(-1)[where].reshape(shape).copy())

    return take
