"""Setting a run directory back to an earlier step: what is later moves aside, and nothing is deleted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.core.checkpoint.format import list_checkpoints
from lockstep.core.files.atomic import remove_temporaries
from lockstep.core.files.jsonl import Cut, cut_after
from lockstep.core.run.layout import CHECKPOINTS, OBSERVATIONS, SPIKES, observation_files, step_of


def set_back(
    run: Path, step: int, branch: Path, aside: Path, lines: Sequence[str], begins_branch: bool
) -> dict[str, Cut]:
    """Move records, checks, checkpoints, observations and spikes after `step` to `branch`, damaged lines to `aside`.

    lines: names of the files of JSON lines, none of them open. begins_branch: make the folder also where nothing moves.
    A setting back that was cut short is finished by the next one. Returns the cut of each file. Raises OSError.
    """
    late = [(path, Path()) for path in list_checkpoints(run / CHECKPOINTS) if step_of(path) > step]
    late += [(path, Path(OBSERVATIONS)) for n, path in observation_files(run / OBSERVATIONS).items() if n > step]
    late += [(path, Path(SPIKES)) for path in list_checkpoints(run / SPIKES) if step_of(path) > step]
    for folder in (branch, aside):
        if folder.exists():
            remove_temporaries(folder)
    cuts = {name: cut_after(run / name, step, branch / name, aside / name) for name in lines}
    if begins_branch:
        branch.mkdir(parents=True, exist_ok=True)
    for path, into in late:
        (branch / into).mkdir(parents=True, exist_ok=True)
        os.rename(path, branch / into / path.name)
    return cuts
