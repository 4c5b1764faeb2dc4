"""A sweep's results as JSON, for scripts: results.json beside the page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from lockstep.core.files.atomic import write_atomically
from lockstep.core.sweep.fit import Optimum, optimum
from lockstep.core.sweep.outcome import COMPLETE
from lockstep.core.sweep.plan import Arm
from lockstep.core.sweep.space import LEARNING_RATE
from lockstep.core.sweep.sweep import Sweep, Trial, ranking

RESULTS = "results.json"


def optimum_of(sweep: Sweep, arm: Arm) -> Optimum | None:
    """Return the optimal learning rate of a width; None if it was not varied, or no trial counts."""
    varied = sweep.plan.sampling.varied
    if not any(one.key == LEARNING_RATE and one.numbers for one in varied):
        return None
    rows = [(t.point, t.outcome.value) for t in sweep.of(arm) if t.outcome.state == COMPLETE]
    return optimum([(point, value) for point, value in rows if value is not None], LEARNING_RATE, varied)


def results(sweep: Sweep) -> dict[str, Any]:
    """Return every trial and, of each width, the best trial and the optimal learning rate."""
    arms = []
    for arm in sweep.plan.arms:
        best, found = ranking(sweep.of(arm)), optimum_of(sweep, arm)
        fitted = None if found is None else {k: v for k, v in vars(found).items() if k != "curve"}
        arms.append({"width": arm.width, "best": best[0].name if best else None, "learning_rate": fitted})
    return {"schema": 1, "arms": arms, "trials": [_row(trial) for trial in sweep.trials]}


def write_results(sweep: Sweep) -> Path:
    """Write results.json, whole or not at all; return where."""
    path = sweep.folder / RESULTS
    write_atomically(path, [json.dumps(results(sweep), indent=1, allow_nan=False).encode() + b"\n"])
    return path


def _row(trial: Trial) -> dict[str, Any]:
    outcome = trial.outcome
    return {
        "trial": trial.name,
        "width": trial.arm.width,
        "settings": dict(trial.point),
        "state": outcome.state,
        "value": _plain(outcome.value),
        "step": outcome.step,
        "why": outcome.why,
        "checks": {"due": outcome.due, "agreed": outcome.agreed, "disagreed": list(outcome.disagreed)},
        "reports": {str(step): _plain(loss) for step, loss in outcome.reports.items()},
        "resumes": outcome.resumes,
        "seconds": round(outcome.seconds, 3),
        "command": trial.line,
    }


def _plain(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
