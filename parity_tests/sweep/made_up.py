"""Trials with made-up runs and known losses, to test sweeps without training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.core.backend import StepRecord
from lockstep.core.config.file import load_config
from lockstep.core.config.schema import EvalConfig, OptimConfig, RunConfig, TrainConfig
from lockstep.core.run.directory import RunDir
from lockstep.core.sweep.outcome import decision_of
from lockstep.core.sweep.plan import Plan, write_plan
from lockstep.core.sweep.propose import choose
from lockstep.core.sweep.space import read_space
from lockstep.core.sweep.sweep import Sweep, Trial
from lockstep.core.sweep.trial import End, Job

CONFIG = RunConfig(
    name="made_up",
    train=TrainConfig(steps=20, batch_size=4, micro_batch_size=4),
    optim=OptimConfig(warmup_steps=2),
    eval=EvalConfig(every=2),
)
BEST = 3e-3
SPACE = ("optim.peak-lr=1e-4:1e-1:log", "optim.weight-decay=0,0.1")


def plan(*space: str, trials: int = 0, sampler: str = "auto", config: RunConfig = CONFIG, **more: Any) -> Plan:
    """Return the plan of a sweep over a space; `SPACE` by default."""
    return Plan(config, choose(read_space(space or SPACE), sampler, trials, 0), **more)


def final_loss(config: RunConfig) -> float:
    """Return the loss after the last step: a parabola in ln lr with its minimum at BEST, for models of any width."""
    return 4 + 0.1 * math.log(config.optim.peak_lr / BEST) ** 2 + 0.01 * config.optim.weight_decay


@dataclass
class MadeUp:
    """An engine of a sweep that writes runs without training.

    order:      sorts the jobs of a round.
    stop_after: the number of trials after which it raises KeyboardInterrupt.
    wrong:      whether the checks of a trial disagree.
    failing:    the reason why a trial fails, or "".
    """

    order: Callable[[Sequence[Job]], Sequence[Job]] = list
    stop_after: int = 10**9
    wrong: Callable[[RunConfig], bool] = lambda config: False
    failing: Callable[[RunConfig], str] = lambda config: ""
    loss: Callable[[RunConfig], float] = final_loss
    made: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Do nothing: there are no machines to reach."""

    def run(self, jobs: Sequence[Job], ended: Callable[[Job, End], None], tick: Callable[[], None]) -> None:
        """Write each run, up to the step at which its pruner stops it."""
        for job in self.order(jobs):
            if len(self.made) >= self.stop_after:
                raise KeyboardInterrupt
            self.made.append(job.name)
            tick()
            ended(job, End(failure=self._write(job)))

    def _write(self, job: Job) -> str:
        flags = dict(word.removeprefix("--").split("=", 1) for word in job.words if "=" in word)
        given = {key.replace("-", "_"): text for key, text in flags.items()}
        config = load_config(Path(job.words[1]), given | {"name": job.name})
        if why := self.failing(config):
            return why
        records = []
        with RunDir.create(Path(job.run), config, {"backend": "torch"}, overwrite=True) as run:
            for step in range(1, config.train.steps + 1):
                loss = self.loss(config) + 2 * (1 - step / config.train.steps)
                metrics = {"val/loss": loss} if config.eval.every and step % config.eval.every == 0 else {}
                record = StepRecord(step, loss, 1.0, config.optim.peak_lr, 1.0, 1.0, "", 4, metrics=metrics)
                run.append_record(record)
                records.append({"step": step, "loss": loss, "metrics": metrics})
                if config.parity.due(step):
                    run.append_check({"step": step, "verdict": "disagreed" if self.wrong(config) else "agreed"})
                if decision_of(job.rule, records, job.validated).step is not None:
                    return ""
            run.finish()
        return ""


def made(folder: Path, of: Plan, engine: MadeUp, retry: bool = False) -> list[Trial]:
    """Run or resume a sweep in a folder; return its trials."""
    write_plan(folder, of)
    with Sweep(folder, of) as sweep:
        sweep.run(engine, lambda trial: None, retry)
        return sweep.trials


def outcomes(trials: Sequence[Trial]) -> list[Any]:
    """Return the results of trials that must be equal for all engines."""
    return [(t.name, dict(t.point), t.outcome.state, t.outcome.value, t.outcome.reports, t.outcome.why) for t in trials]
