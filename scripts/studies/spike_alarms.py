"""Count false alarms of loss spikes over all steps of clean runs.

python -m lockstep.scripts.studies.spike_alarms RUN…            one line per run, then the sum at 4, 5 and 6 sigma
"""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import read_lines
from lockstep.core.train.spikes import WINDOW, SpikeDetector

SIGMAS = (4.0, 5.0, 6.0)


def alarms(losses: list[tuple[int, float]], sigma: float) -> list[int]:
    """Return the steps whose loss is a spike at `sigma` sigma."""
    detector = SpikeDetector(sigma)
    return [step for step, loss in losses if detector.look(step, loss)]


def main(argv: list[str]) -> int:
    """Print the alarms of each run."""
    looked, found = 0, dict.fromkeys(SIGMAS, 0)
    for name in argv:
        losses = [(line["step"], line["loss"]) for line in read_lines(Path(name) / "records.jsonl")]
        each = {sigma: alarms(losses, sigma) for sigma in SIGMAS}
        looked += max(0, len(losses) - WINDOW)
        for sigma, steps in each.items():
            found[sigma] += len(steps)
        print(
            f"{name}: {len(losses)} steps; " + "; ".join(f"{s:g} sigma: {steps or 'none'}" for s, steps in each.items())
        )
    print(f"{looked} steps examined; " + ", ".join(f"{n} beyond {sigma:g} sigma" for sigma, n in found.items()))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"spike_alarms: {error}")
