"""Run a kept batch again: the run's candidate goes from the nearest stored state to its step, and makes the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.core.backend import Backend, Batch, StepRecord
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.modes.replay import config_of_steps
from lockstep.core.parity.modes.rerun import Rerun, differing_fields
from lockstep.core.run.directory import RunDir


@dataclass(frozen=True)
class Repeated:
    """A step that was run again.

    record: what it said of itself now. differ: (field, then, now) of what is not the same bits. on_the_way: the first
    step before it that did not come out as recorded, or None. loaded: steps done in the state that was begun from.
    in_order: whether the data order gives the kept batch at this step.
    """

    record: StepRecord
    differ: list[tuple[str, Any, Any]]
    on_the_way: int | None
    loaded: int
    in_order: bool


def replay_spike(
    run: RunDir,
    about: Mapping[str, Any],
    kept: Batch,
    batch: Callable[[int], Batch],
    candidate: Backend,
    config: RunConfig,
) -> Repeated:
    """Run step `about["step"]` of a run again on the batch that was kept, after the steps before it.

    about, kept: as core/train/spikes.py reads them. batch: the data order. config: the run's, but for the device.
    Raises UserError if a stored state is damaged or does not fit, and what the session raises (NotFinite as well).
    """
    step = about["step"]
    rerun = Rerun(run, candidate, config_of_steps(run, config), batch)
    try:
        record = rerun.step_on(step, kept)
        return Repeated(
            record,
            differing_fields(about["record"], asdict(record)),
            rerun.first_difference(rerun.loaded),
            rerun.loaded,
            batch(step).digest() == kept.digest(),
        )
    finally:
        rerun.close()
