"""Names of what lies in a run directory, and of the steps there."""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.core.checkpoint.format import checkpoint_step

CONFIG, INFO, RECORDS, CHECKS, CHECKPOINTS = "config.toml", "run.json", "records.jsonl", "parity.jsonl", "checkpoints"
OBSERVATIONS, CAPSULES, SPIKES, SAVED = "observations", "capsules", "spikes", "checkpoints.jsonl"
# The evidence of pending checks. A run that goes on removes what a killed run left there.
EVIDENCE = "evidence"
# The end of a message about a folder that is no run.
LISTED = "lockstep runs lists those below runs/"
LINES = RECORDS, CHECKS, SAVED
_OBSERVED = re.compile(r"step_(\d{6,})\.npz")


def observation_files(folder: Path) -> dict[int, Path]:
    """Map each step to the file of its observations in a folder."""
    found = ((_OBSERVED.fullmatch(path.name), path) for path in folder.glob("step_*.npz"))
    return {int(match[1]): path for match, path in found if match}


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint or spike that is there."""
    step = checkpoint_step(path)
    assert step is not None
    return step


def is_run(path: Path) -> bool:
    """Return whether a folder is a run directory: it has the configuration and run.json."""
    return (path / CONFIG).is_file() and (path / INFO).is_file()
