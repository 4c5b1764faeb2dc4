"""Observations of a step as a file in the run directory. `lockstep replay` can judge it later and elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.core.backend import Batch, NotSupported, Session, StepRecord
from lockstep.core.capabilities import ShowsStepGradients, Sketches, SketchesStep, ask
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.names import GRADIENT, tap_names
from lockstep.core.parity.evidence.loss_weights import weighted_of, weighted_rows
from lockstep.core.parity.evidence.observations import Observation, save
from lockstep.core.parity.evidence.probe import micro_to_probe
from lockstep.core.parity.evidence.probe import probe_of as probe_of_micro
from lockstep.core.parity.judge.end_to_end import observations


def observation_file(folder: Path, step: int) -> Path:
    """Return the path `observations/step_000100.npz`."""
    return folder / f"step_{step:06d}.npz"


def probe_of(batch: Batch, config: RunConfig) -> Batch:
    """Return the micro-batch on which a training step is observed, a function of the step's batch and the run."""
    return probe_of_micro(micro_to_probe(batch, config), config, turn=int(batch.digest()[:8], 16))


def save_observations(folder: Path, step: int, batch: Batch, probe: Batch, found: Mapping[str, Observation]) -> Path:
    """Write one step's observations with all that a replay needs. Raises UserError if writing fails."""
    about: dict[str, Any] = {
        "step": step,
        "batch": batch.digest(),
        "probe": probe.digest(),
        "rows": weighted_rows(probe).tolist(),
    }
    path = observation_file(folder, step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    save(path, found, about)
    return path


def observe(session: Session, config: RunConfig, probe: Batch) -> Mapping[str, Observation]:
    """Observe the probe at the session's weights, by the session's sketches or from the tensors that it shows.

    Raises NotSupported if it supports neither.
    """
    try:
        found: Mapping[str, Observation] = ask(session, Sketches).sketch(probe)
        return found
    except NotSupported:
        pass
    probed = session.gradients(probe)
    names = [name for tap in tap_names(config.model) for name in (tap, GRADIENT + tap)]
    try:
        taps = weighted_of(session.observe(probe, names), probe)
    except NotSupported:
        taps = {}
    return observations(replace(probed, nll=probed.nll[weighted_rows(probe)]), taps, config.model)


def observed_step(
    session: Session, config: RunConfig, batch: Batch, norms: bool
) -> tuple[StepRecord, Mapping[str, Observation]]:
    """Run a step and observe its own NLL and gradients, after accumulation and before clipping.

    Raises NotSupported before the step if the session cannot show them. The observations are empty if this step does
    not.
    """
    try:
        sketches = ask(session, SketchesStep)
    except NotSupported:
        record, shown = ask(session, ShowsStepGradients).step_and_gradients(batch, norms=norms)
        return record, observations(shown, {}, config.model)
    record, found = sketches.step_and_sketches(batch, norms=norms)
    return record, found or {}
