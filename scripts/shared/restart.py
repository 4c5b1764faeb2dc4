"""Resume `lockstep train CONFIG` when torchrun restarts its ranks, or Slurm its job.

The count of restarts does not show this, because each of torchrun's agents has its own count. A run records the name of
the launch that made it or last continued it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.errors import UserError
from lockstep.core.files.paths import quoted
from lockstep.core.run.launch import launch_id, launched, restarts

if TYPE_CHECKING:
    from lockstep.core.run.directory import RunDir

LAUNCH, RESTARTS = "launch", "restarts"


def is_of_this_launch(run: RunDir) -> bool:
    """Return whether this launch made or continued the run before its ranks were restarted."""
    return launch_id() is not None and run.info.get(LAUNCH) == launch_id()


def run_of_this_launch(path: Path, overwrite: bool) -> RunDir | None:
    """Return the run at `path` to continue if it is of this launch; only a finished one is overwritten.

    Raises UserError if the ranks were restarted and the launch has no name that identifies its run.
    """
    from lockstep.core.run.directory import RunDir
    from lockstep.core.run.layout import is_run

    if not is_run(path):
        return None
    if restarts() and launch_id() is None:
        raise UserError(
            f"{path}: the ranks were restarted, and this launch has no name that shows whether the run is its own; "
            "give torchrun an --rdzv-id (or --standalone), or continue with: lockstep train --resume "
            f"{quoted(path)}"
        )
    run = RunDir.open(path)
    replaced = overwrite and run.info.get("finished") and not restarts()
    return run if is_of_this_launch(run) and not replaced else None


def with_ranks_that_are_left(given: Mapping[str, str], run: RunDir) -> dict[str, str]:
    """Return a command line's settings with `train.ranks` set to the ranks torchrun restarted (`--nnodes MIN:MAX`).

    The device is the run's, with `auto` already resolved.
    """
    place = launched()
    return {"device": run.config.device, **given, "train.ranks": str(place[1] if place else 1)}


def note_launch(run: RunDir, before: RunDir | None, step: int) -> int:
    """Write the launch that continues a run from `step` to run.json; return the number of this start, from 0.

    before: the same run as it was before it was begun anew.
    """
    known = before or run
    past = list(known.info.get(RESTARTS, [])) if is_of_this_launch(known) else []
    again = is_of_this_launch(known) and (before is not None or step > 0)
    if again:
        past.append({"restart": len(past) + 1, "step": step, "time": datetime.now(UTC).isoformat(timespec="seconds")})
    run.update_info(**{LAUNCH: launch_id(), RESTARTS: past})
    return len(past) if again else 0
