"""The outcome of a trial, read from its run directory alone: killed, resumed or made elsewhere, it is the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.parity.modes.coverage import coverage
from lockstep.core.run.directory import RunDir
from lockstep.core.run.info import settings_of
from lockstep.core.run.layout import CHECKS, is_run
from lockstep.core.sweep.prune import Decision, Earlier, Rule, decide, reports_of

WAITING, RUNNING = "waiting", "running"
COMPLETE, PRUNED, FAILED, MARKED = "complete", "pruned", "failed", "marked"
ENDED = (COMPLETE, PRUNED, FAILED, MARKED)
# Points of a training curve that are kept for the page.
CURVE = 240
# The value of a setting that a run replaces by what it chose.
_AUTO = "auto"
_NAMED = 2


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial, as its run directory shows it.

    value: the objective, None if there is none: the last validation loss, or, in a run without, the mean training loss
    of its last tenth. step: the last one that counts. why: of a trial that was pruned, failed or marked. reports: step
    → loss that the pruner sees. curve: (step, training loss), at most CURVE of them, each the mean of its stretch.
    agreed, disagreed, due: parity checks up to `step`. resumes: how often it went on from a checkpoint.
    """

    state: str
    value: float | None = None
    step: int = 0
    why: str = ""
    reports: Mapping[int, float] = field(default_factory=dict)
    rungs: Mapping[str, float] = field(default_factory=dict)
    curve: Sequence[tuple[int, float]] = ()
    agreed: int = 0
    disagreed: Sequence[int] = ()
    due: int = 0
    resumes: int = 0
    seconds: float = 0.0

    @property
    def earlier(self) -> Earlier:
        """Return it as later trials are held against it: one that a check accused, or that failed, counts nothing."""
        return Earlier(self.state, self.value, self.reports, self.rungs)


def read_outcome(run: Path, rule: Rule, failure: str = "", varied: Mapping[str, Any] | None = None) -> Outcome:
    """Read what came of a trial so far.

    failure: why its process ended without finishing, empty if it did not, or may go on.
    varied: the values of the trial's varied settings. A run with others, such as one that was resumed by hand with
    another learning rate, has failed as this trial.
    A trial that is neither finished nor given up is `waiting` or `running`.
    """
    if not is_run(run):
        return Outcome(FAILED, why=failure) if failure else Outcome(WAITING)
    try:
        opened = RunDir.open(run)
        if varied is not None and (said := _other_settings(opened.asked, varied)):
            return Outcome(FAILED, why=said)
        return _read(opened, rule, failure)
    except UserError as error:
        return Outcome(FAILED, why=failure or str(error))


def _other_settings(run: RunConfig, due: Mapping[str, Any]) -> str:
    """Describe the varied settings of a run that are not those of its trial; empty if all are.

    A setting of `auto` is not compared, because a run records its choice instead.
    """
    there = settings_of(run)
    differ = [key for key in due if due[key] != _AUTO and there.get(key) != due[key]]
    named = [f"{key} is {there.get(key)!r}, and the trial has {due[key]!r}" for key in differ[:_NAMED]]
    if len(differ) > _NAMED:
        named.append(f"{len(differ) - _NAMED} more")
    return f"its run has other settings: {'; '.join(named)}; remove its folder to make it again" if named else ""


def _read(run: RunDir, rule: Rule, failure: str) -> Outcome:
    steps, validated = run.config.train.steps, run.config.eval.every > 0
    records = sorted({line["step"]: line for line in run.records()}.values(), key=lambda line: int(line["step"]))
    reports = reports_of(records, steps, validated)
    decision = decide(rule, reports)
    cut = decision.step if decision.step is not None else steps
    records = [line for line in records if line["step"] <= cut]
    reports = {step: loss for step, loss in reports.items() if step <= cut}
    checks = [line for line in run.checks() if line.get("step", 0) <= cut]
    bad = sorted(line["step"] for line in checks if line.get("verdict") == "disagreed")
    facts: dict[str, Any] = {
        "step": records[-1]["step"] if records else 0,
        "reports": reports,
        "rungs": decision.rungs,
        "curve": _curve(records),
        "agreed": sum(line.get("verdict") == "agreed" for line in checks),
        "disagreed": tuple(bad),
        "due": len(run.checks_due(cut)),
        "resumes": len(run.info.get("resumes", [])),
        "seconds": sum(float(line.get("seconds") or 0.0) for line in records),
    }
    finished = bool(run.info.get("finished"))
    value = _objective(records, reports, steps, validated) if finished and decision.step is None else None
    over = finished or decision.step is not None or bool(failure)
    if bad and over:
        said = f"the parity check{'s' if len(bad) > 1 else ''} of step {', '.join(map(str, bad))} disagreed"
        return Outcome(MARKED, value, why=said, **facts)
    if decision.step is not None:
        return Outcome(PRUNED, why=decision.why, **facts)
    if not finished:
        return Outcome(FAILED, why=failure, **facts) if failure else Outcome(RUNNING, **facts)
    made = coverage(run.checks_due(steps), checks, f"{CHECKS} has no line of it")
    if not made.is_enough:
        return Outcome(FAILED, value, why=made.words, **facts)
    if value is None:
        return Outcome(
            FAILED, None, why=f"its record of step {steps} is missing, or has no loss to rank it by", **facts
        )
    if not math.isfinite(value):
        return Outcome(FAILED, None, why="its last loss is not finite", **facts)
    return Outcome(COMPLETE, value, **facts)


def _objective(
    records: Sequence[Mapping[str, Any]], reports: Mapping[int, float], steps: int, validated: bool
) -> float | None:
    if validated:
        return reports.get(steps)
    last = [float(line["loss"]) for line in records[-max(1, steps // 10) :]]
    return sum(last) / len(last) if last else None


def _curve(records: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, float], ...]:
    found = [(int(line["step"]), float(line["loss"])) for line in records if isinstance(line.get("loss"), int | float)]
    stride = max(1, -(-len(found) // CURVE))
    parts = [found[i : i + stride] for i in range(0, len(found), stride)]
    return tuple((part[-1][0], sum(loss for _, loss in part) / len(part)) for part in parts)


def decision_of(rule: Rule, records: Sequence[Mapping[str, Any]], validated: bool) -> Decision:
    """Return whether a trial that trains is given up, by the records that it has written so far."""
    return decide(rule, reports_of(records, rule.steps, validated))
