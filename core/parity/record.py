"""Observations of a step as a file of the run directory, from which `lockstep replay` judges it later and elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.errors import UserError
from core.parity.evidence import Evidence
from core.parity.observations import Observation, save


def observation_file(folder: Path, step: int) -> Path:
    """`observations/step_000100.npz`."""
    return folder / f"step_{step:06d}.npz"


def about(evidence: Evidence) -> dict[str, Any]:
    """What a replay must know besides the sketches.

    step:      number of the step. batch: digest of its batch. probe, tapped: digests of the batches that were observed.
    sequences: of `tapped`, those that have loss weight.
    """
    return {
        "step": evidence.record.step,
        "batch": evidence.batch.digest(),
        "probe": evidence.probe.digest(),
        "tapped": evidence.tapped.digest(),
        "sequences": evidence.sequences,
    }


def save_observations(folder: Path, evidence: Evidence, found: Mapping[str, Observation]) -> Path:
    """Write one step's observations. Raises UserError if the disk refuses."""
    path = observation_file(folder, evidence.record.step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    save(path, found, about(evidence))
    return path
