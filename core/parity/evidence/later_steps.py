"""A run's first step as a later one of the run: what depends on the step's number alone is seen before it comes.

`lockstep parity` checks the first steps, in which a schedule mostly warms up; one that never decays is wrong hundreds
of steps later. The last of them is made with weights so small that its gradients are shorter than `optim.clip_norm`,
as those of later steps are: in a first step they are mostly longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lockstep.core.arrays import Scaled
from lockstep.core.backend import Batch, NotSupported, Session, State, StepRecord, in_words
from lockstep.core.capabilities import Loads, ask
from lockstep.core.config.schema import RunConfig
from lockstep.core.train.finite import NotFinite
from lockstep.core.train.schedule import decay_steps

# A power of two. Logits of such weights are next to nothing, and gradients are smaller than they were by about as much.
SMALL = 2.0**-10


def numbers(config: RunConfig) -> list[int]:
    """Return the steps that are tried: the one midway in the decay of the learning rate, and the last."""
    last = config.train.steps
    return sorted({number for number in (last - decay_steps(config.optim, last) // 2, last) if number > 1})


def as_later_steps(records: Sequence[StepRecord], config: RunConfig) -> dict[str, tuple[int, StepRecord]]:
    """Return the number and record of each later step, by what is added to the names of its scalars: `/200`."""
    return {f"/{number}": (number, record) for number, record in zip(numbers(config), records, strict=False)}


def later_steps(
    session: Session, config: RunConfig, batch: Batch, before: State, after: State, missing: list[str]
) -> tuple[StepRecord, ...]:
    """Run the first step again as each of `numbers`, and return its records; the session then has `after` again.

    Nothing is done after a run's first step. `missing` gets what is not done in the first one. Every rank calls it.
    """
    if before.step:
        return ()
    load, records = ask(session, Loads).load, []
    try:
        for number in numbers(config):
            params = Scaled(before.params, SMALL) if number == config.train.steps else before.params
            load(replace(before, step=number - 1, params=params))
            records.append(session.step(batch))
    except Exception as reason:
        # As in two steps in a row (core/parity/evidence/in_a_row.py).
        if config.train.ranks > 1 and not isinstance(reason, (NotSupported, NotFinite)):
            raise
        missing.append(f"learning rate and clipping of later steps: {in_words(reason)}")
    load(after)
    return tuple(records)
