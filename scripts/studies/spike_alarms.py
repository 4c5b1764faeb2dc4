"""Count false alarms of loss spikes over all steps of clean runs.

python -m lockstep.scripts.studies.spike_alarms RUN…            one line per run, then the sum at 4, 5 and 6 sigma
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import read_lines
from lockstep.core.run.layout import RECORDS, is_run
from lockstep.core.train.spikes import WINDOW, SpikeDetector

SIGMAS = (4.0, 5.0, 6.0)


def alarms(losses: list[tuple[int, float]], sigma: float) -> list[int]:
    """Return the steps whose loss is a spike at `sigma` sigma."""
    detector = SpikeDetector(sigma)
    return [step for step, loss in losses if detector.look(step, loss)]


def main(runs: Annotated[tuple[Path, ...], tyro.conf.Positional]) -> None:
    """Print the alarms of each run. Raises UserError without a run."""
    if not runs:
        raise UserError("name the runs to examine")
    looked, found = 0, dict.fromkeys(SIGMAS, 0)
    for run in runs:
        if not is_run(run):
            raise UserError(f"{run} is not a run directory")
        losses = [(line["step"], line["loss"]) for line in read_lines(run / RECORDS)]
        each = {sigma: alarms(losses, sigma) for sigma in SIGMAS}
        looked += max(0, len(losses) - WINDOW)
        for sigma, steps in each.items():
            found[sigma] += len(steps)
        print(
            f"{run}: {len(losses)} steps; " + "; ".join(f"{s:g} sigma: {steps or 'none'}" for s, steps in each.items())
        )
    print(f"{looked} steps examined; " + ", ".join(f"{n} beyond {sigma:g} sigma" for sigma, n in found.items()))


if __name__ == "__main__":
    try:
        tyro.cli(main, description=__doc__)
    except UserError as error:
        sys.exit(f"spike_alarms: {error}")
