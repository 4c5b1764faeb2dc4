"""A run's first step as a later one of the run: what depends on the step's number alone is seen before it comes.

`lockstep parity` checks the first steps, in which a schedule mostly warms up; one that never decays is wrong hundreds
of steps later. The last of them is made with weights so small that its gradients are shorter than `optim.clip_norm`,
as those of later steps are: in a first step they are mostly longer.

Records say what a session means to do. So that what it does is held to the reference as well, a part of each
parameter's gradient, and of its moments and weights after the step, is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.core.arrays import Scaled
from lockstep.core.backend import Arrays, Batch, NotSupported, Session, State, StepRecord, in_words
from lockstep.core.capabilities import Loads, Take, ask
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.graph import Shape
from lockstep.core.model.groups import update_rules
from lockstep.core.model.names import parameter_shapes
from lockstep.core.parity.evidence.round_trip import differs_once_read
from lockstep.core.parity.evidence.store import Store
from lockstep.core.parity.measures.drawn_part import drawn_part
from lockstep.core.streams import GRADS, PROGRAM, StreamStep, stream_gradients, stream_state, with_tensors
from lockstep.core.train.finite import NotFinite
from lockstep.core.train.schedule import decay_steps

# A power of two. Logits of such weights are next to nothing, and gradients are smaller than they were by about as much.
SMALL = 2.0**-10
# Elements that are kept of each parameter, filled up to whole rows.
KEPT = 1 << 14
# Of the decay. In its middle a cosine has the rate of a straight line.
SHARE = 0.4


@dataclass(frozen=True)
class Moved:
    """Hold what a later step made of each parameter, of the part that `parts` says.

    number: of the step. grads: its gradients. after: weights and moments after it.
    """

    number: int
    grads: Arrays
    after: State


def numbers(config: RunConfig) -> list[int]:
    """Return the steps that are tried: one in the middle of the learning rate's decay, and the last."""
    last = config.train.steps
    return sorted({n for n in (last - round(SHARE * decay_steps(config.optim, last)), last) if n > 1})


def as_later_steps(records: Sequence[StepRecord], config: RunConfig) -> dict[str, tuple[int, StepRecord]]:
    """Return the number and record of each later step, by what is added to the names of its taps: `/200`."""
    return {f"/{number}": (number, record) for number, record in zip(numbers(config), records, strict=False)}


def state_before(after: State, number: int, config: RunConfig) -> State:
    """Return the state that a later step begins with. after: the state after the first step."""
    params = Scaled(after.params, SMALL) if number == config.train.steps else after.params
    return replace(after, step=number - 1, params=params)


def parts(config: RunConfig, number: int) -> Mapping[str, tuple[slice, Shape]]:
    """Return the parameters that are kept of a later step: their elements, row-major, and the shape of those.

    Matrices that move as a whole (Muon's) are kept whole, so of those the smallest alone is.
    """
    shapes, rules = parameter_shapes(config.model), update_rules(config)
    whole = [name for name in shapes if rules[name].together is None]
    smallest = min(whole, key=lambda name: (np.prod(shapes[name]), name), default=None)
    chosen = [name for name in shapes if rules[name].together is not None or name == smallest]
    return {name: drawn_part(config, name, number - 1, KEPT) for name in chosen}


@dataclass(frozen=True)
class Later:
    """Hold what came of a run's first step as later ones.

    records: of each of `numbers`. moved: what they moved. rewritten: what differs in the state after the last of them
    once it was written and read back, in words; None where that was not tried.
    """

    records: tuple[StepRecord, ...] = ()
    moved: tuple[Moved, ...] = ()
    rewritten: tuple[str, ...] | None = None


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

    The session then has `after` again: the state after the first step, which each of them begins with. Nothing is done
    after another step. in_passing: the session's step, if that shows its gradients; else they are computed before it.
    `missing` gets what is not done in the first one. Every rank calls it; of several, each makes the steps alone.
    """
    if after.step != 1:
        return Later()
    load = ask(session, Loads).load
    records: list[StepRecord] = []
    moved: list[Moved] = []
    rewritten = None
    if config.train.ranks > 1:
        missing.append("moments, update and checkpoint of later steps: with one rank alone")
    try:
        for number in numbers(config):
            load(state_before(after, number, config))
            if config.train.ranks > 1:
                records.append(session.step(batch))
                continue
            record, found = _made(session, batch, number, store, parts(config, number), in_passing)
            records.append(record)
            moved += [found] if found else []
            if number == config.train.steps:
                rewritten = differs_once_read(session, number, after)
    except Exception as reason:
        # As in two steps in a row (core/parity/evidence/in_a_row.py).
        if config.train.ranks > 1 and not isinstance(reason, (NotSupported, NotFinite)):
            raise
        missing.append(f"{_left(len(records), config)}: {in_words(reason)}")
    load(after)
    return Later(tuple(records), tuple(moved), rewritten)


def _left(made: int, config: RunConfig) -> str:
    if made < len(numbers(config)):
        return "learning rate, clipping and update of later steps"
    return "the checkpoint of the last step"


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
