"""Run a kept batch again: the candidate runs from the nearest stored state to its step, and makes the step."""

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

    record: its record now.
    differ: (field, then, now) for fields with other bits.
    on_the_way: the first earlier step with another record than the run's, or None.
    loaded: steps done in the stored state from which it was run.
    in_order: the data order gives the kept batch at this step.
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
    """Run step `about["step"]` of a run again on the kept batch, after the steps before it.

    about, kept: as from core/train/spikes.py.
    batch: the data order, step → batch.
    config: the run's configuration, possibly with another device.
    Raises UserError if a stored state is damaged or does not fit, and the errors of the session (NotFinite as well).
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
