"""Decide if a trial is given up, and at which step, from its own reports and from earlier rounds alone.

Optuna's pruners decide. Each decision is made in a study in memory that holds the trials of earlier rounds as they
ended, and this one as far as it has come. So a trial is never held against one that trains beside it, and the decision
is the same whatever the number of jobs, and after a kill.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.core.sweep.propose import in_memory

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.trial import FrozenTrial

NONE, MEDIAN, HYPERBAND = "none", "median", "hyperband"
PRUNERS = (NONE, MEDIAN, HYPERBAND)
# The median needs this many finished trials, and leaves this share of the steps alone, beside the warm-up.
STARTUP, LEFT_ALONE = 4, 0.2
# Hyperband keeps one of this many from each rung.
REDUCTION = 3


@dataclass(frozen=True)
class Earlier:
    """An earlier trial, with which later ones are compared.

    state: `complete`, `pruned`, or anything else, which counts nothing.

    value: its objective. reports: step → loss, up to where it ended. rungs: Optuna's record of Hyperband.
    """

    state: str
    value: float | None = None
    reports: Mapping[int, float] = field(default_factory=dict)
    rungs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """The rule by which trials of a round are pruned.

    steps, warmup, least: of a run: all, of the warm-up, the first report.

    earlier: the trials before this one, by number; of its own round, placeholders.
    """

    pruner: str
    steps: int
    warmup: int
    least: int
    number: int
    earlier: tuple[Earlier, ...] = ()


@dataclass(frozen=True)
class Decision:
    """The step at which a trial is given up, and the reason; step None: not so far. rungs: as `Earlier` has them."""

    step: int | None = None
    why: str = ""
    rungs: Mapping[str, float] = field(default_factory=dict)


def decide(rule: Rule, reports: Mapping[int, float]) -> Decision:
    """Replay a trial's reports by step, up to the one where the pruner gives it up."""
    if rule.pruner == NONE or not reports:
        return Decision()
    from optuna.samplers import RandomSampler
    from optuna.storages import InMemoryStorage

    study = in_memory(RandomSampler(seed=0))
    study.add_trials([frozen(one) for one in rule.earlier])
    pruner = _pruner(rule)
    trial = study.ask()
    assert trial.number == rule.number, "one earlier trial a number"
    storage = study._storage
    assert isinstance(storage, InMemoryStorage)

    def rungs() -> dict[str, float]:
        return {key: float(value) for key, value in storage.get_trial(trial._trial_id).system_attrs.items()}

    for step, loss in sorted(reports.items()):
        trial.report(loss, step)
        if pruner.prune(study, storage.get_trial(trial._trial_id)):
            return Decision(step, _why(rule, step, reports), rungs())
    return Decision(rungs=rungs())


def frozen(
    one: Earlier, parameters: Mapping[str, Any] | None = None, space: Mapping[str, Any] | None = None
) -> FrozenTrial:
    """Return a trial that ended as Optuna has it; one that counts nothing is a failed one."""
    from optuna.trial import TrialState, create_trial

    if one.state not in ("complete", "pruned"):
        return create_trial(state=TrialState.FAIL)
    return create_trial(
        state=TrialState.COMPLETE if one.state == "complete" else TrialState.PRUNED,
        value=one.value if one.state == "complete" else None,
        params=dict(parameters or {}),
        distributions=dict(space or {}),
        intermediate_values=dict(one.reports),
        system_attrs=dict(one.rungs),
    )


def _pruner(rule: Rule) -> BasePruner:
    from optuna.pruners import HyperbandPruner, MedianPruner

    if rule.pruner == MEDIAN:
        alone = max(rule.warmup, math.ceil(LEFT_ALONE * rule.steps))
        return MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=alone)
    return HyperbandPruner(min_resource=rule.least, max_resource=rule.steps, reduction_factor=REDUCTION)


def _why(rule: Rule, step: int, reports: Mapping[int, float]) -> str:
    loss = reports[step]
    if not math.isfinite(loss):
        return f"its loss at step {step} is not finite"
    if rule.pruner == MEDIAN:
        others = [one.reports[step] for one in rule.earlier if one.state == "complete" and step in one.reports]
        best = min(value for at, value in reports.items() if at <= step)
        return (
            f"at step {step} its best loss so far, {best:.4f}, is above {statistics.median(others):.4f}, the median of "
            f"{len(others)} finished trials there"
        )
    return f"at step {step} its loss, {loss:.4f}, is not among the best of its Hyperband bracket"


def reports_of(records: Sequence[Mapping[str, Any]], steps: int, validated: bool) -> dict[int, float]:
    """Return step → loss at which a trial reports: each validation loss, or ten means of the training loss.

    validated: whether the run has a validation loss. A value that is no number, as NaN, is reported as NaN.
    """
    from lockstep.core.train.validation import LOSS

    if validated:
        found = ((record["step"], dict(record.get("metrics") or {}).get(LOSS)) for record in records)
        return {step: _plain(value) for step, value in found if value is not None}
    every = max(1, steps // 10)
    losses = {record["step"]: _plain(record.get("loss")) for record in records}
    reports: dict[int, float] = {}
    for step in sorted(losses):
        if step % every == 0 or step == steps:
            reports[step] = statistics.fmean(v for at, v in losses.items() if step - every < at <= step)
    return reports


def _plain(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else math.nan
