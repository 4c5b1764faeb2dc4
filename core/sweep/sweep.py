"""A sweep from its first trial to its last: proposed in rounds, made by an engine, read from the run directories."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.config.file import COMMAND_LINE
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.files.jsonl import JsonLines, read_lines
from lockstep.core.files.lock import FolderLock
from lockstep.core.run.info import settings_of
from lockstep.core.run.layout import RECORDS, is_run
from lockstep.core.sweep.journal import Journal
from lockstep.core.sweep.local import Engine
from lockstep.core.sweep.outcome import COMPLETE, ENDED, FAILED, RUNNING, WAITING, Outcome, read_outcome
from lockstep.core.sweep.plan import CONFIG, Arm, Plan
from lockstep.core.sweep.propose import TPE, as_parameters, distributions, points
from lockstep.core.sweep.prune import Earlier, Rule, frozen
from lockstep.core.sweep.space import Point, config_of, in_words
from lockstep.core.sweep.trial import End, Job, Records

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

TRIALS, LOGS, ENDS = "trials", "logs", "ends.jsonl"
# Variables by which libraries count their threads; a trial's are the same under every engine.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass
class Trial:
    """A trial, and what is known of it so far. loss: the last training loss."""

    arm: Arm
    number: int
    point: Point
    outcome: Outcome = field(default_factory=lambda: Outcome(WAITING))
    failure: str = ""
    step: int = 0
    loss: float | None = None
    steps: int = 0
    line: str = ""

    @property
    def name(self) -> str:
        """Return its name, and its run's."""
        return self.arm.trial(self.number)


class Sweep:
    """The trials of a folder, in the order of width and number. Holds the folder's lock until `close`."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        """Open a folder that `write_plan` made. Raises UserError if another process holds it, or a file is damaged."""
        self.folder, self.plan = folder, plan
        self.trials: list[Trial] = []
        self._config = folder / CONFIG
        self._configs: dict[str, RunConfig] = {}
        self._lock = FolderLock(folder)
        try:
            self._journal = Journal(folder, plan.sampling.varied, plan.identity)
            self._ends = JsonLines(folder / ENDS)
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        """Release the folder's lock."""
        self._ends.close()
        self._lock.release()

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def of(self, arm: Arm) -> list[Trial]:
        """Return the trials of a width, by number."""
        return [trial for trial in self.trials if trial.arm == arm]

    def run(self, engine: Engine, told: Callable[[Trial | None], None], retry: bool = False) -> None:
        """Make every trial that has not ended.

        told: a function called with a trial that begins, goes on or has ended, and with None now and then meanwhile.
        retry: trials that failed are made again.
        """
        ends = self._read_ends()
        for begin, end in self.plan.rounds:
            self._propose(begin, end, ends)
            if retry:
                self._forget_failures(begin, end)
            jobs = {job.name: (trial, job) for trial, job in map(self._job, self._round(begin, end)) if job}
            for trial in self._round(begin, end):
                told(trial)
            following = {name: Records(Path(job.run) / RECORDS) for name, (_, job) in jobs.items()}

            def ended(job: Job, end: End, jobs: Mapping[str, tuple[Trial, Job]] = jobs) -> None:
                trial = jobs[job.name][0]
                self._note(trial, end)
                told(trial)

            def tick(jobs: Mapping[str, tuple[Trial, Job]] = jobs, records: Mapping[str, Records] = following) -> None:
                for name, (trial, job) in jobs.items():
                    _follow(trial, job, records[name])
                told(None)

            if jobs:
                engine.run([job for _, job in jobs.values()], ended, tick)

    def _round(self, begin: int, end: int) -> list[Trial]:
        return [trial for trial in self.trials if begin <= trial.number < end]

    def _propose(self, begin: int, end: int, ends: Mapping[str, str]) -> None:
        for arm in self.plan.arms:
            kept = self._journal.points(arm.study)
            if len(kept) < end:
                new = points(self.plan.sampling, begin, end, self._history(arm, begin))
                for point in new[max(0, len(kept) - begin) :]:
                    self._journal.add(arm.study, point)
                kept = self._journal.points(arm.study)
            for number in range(begin, end):
                trial = Trial(arm, number, kept[number])
                trial.failure = ends.get(trial.name, "")
                self.trials.append(trial)
                try:
                    trial.steps = self._config_of(trial).train.steps
                except UserError as error:  # a rule refuses what TPE has drawn
                    trial.failure = f"refused: {error.lines[0]}"
                self._read(trial)
        self.trials.sort(key=lambda trial: (self.plan.arms.index(trial.arm), trial.number))

    def _history(self, arm: Arm, begin: int) -> list[FrozenTrial]:
        if self.plan.sampling.sampler != TPE:
            return []
        varied = self.plan.sampling.varied
        space = distributions(varied)
        return [
            frozen(trial.outcome.earlier, as_parameters(varied, trial.point), space)
            for trial in self.of(arm)
            if trial.number < begin
        ]

    def settings(self, trial: Trial) -> dict[str, str]:
        """Return the settings of a trial beside the sweep's configuration, as the command line gives them."""
        return {**trial.arm.settings, **trial.point}

    def _config_of(self, trial: Trial) -> RunConfig:
        if trial.name not in self._configs:
            self._configs[trial.name] = config_of(self._config, self.settings(trial))
        return self._configs[trial.name]

    def _rule(self, trial: Trial) -> Rule:
        config = self._config_of(trial)
        begin = trial.number // self.plan.per_round * self.plan.per_round
        before = [other for other in self.of(trial.arm) if other.number < trial.number]
        earlier = tuple(other.outcome.earlier if other.number < begin else Earlier(WAITING) for other in before)
        least = config.eval.every or max(1, config.train.steps // 10)
        return Rule(self.plan.pruner, config.train.steps, config.optim.warmup_steps, least, trial.number, earlier)

    def run_of(self, trial: Trial) -> Path:
        """Return the run directory of a trial."""
        return self.folder / TRIALS / trial.name

    def _job(self, trial: Trial) -> tuple[Trial, Job | None]:
        if trial.outcome.state in ENDED:
            return trial, None
        return trial, self._make_job(trial)

    def _make_job(self, trial: Trial) -> Job:
        run, config = self.run_of(trial), self._config_of(trial)
        backend = ("--backend", self.plan.backend) if self.plan.backend else ()
        begin = ["train", str(self._config), "--name", trial.name, "--out", str(run.parent), *backend]
        for key, text in self.settings(trial).items():
            begin.append(f"--{key.replace('_', '-')}={text}")
        return Job(
            trial.name,
            str(run),
            str(self.folder / LOGS / f"{trial.name}.txt"),
            tuple(begin),
            ("train", "--resume", str(run), *backend),
            self._rule(trial),
            config.eval.every > 0,
            os.getcwd(),
            {name: str(self.plan.threads) if self.plan.threads else os.environ.get(name) for name in THREADS},
        )

    def _read(self, trial: Trial) -> None:
        if trial.failure.startswith("refused: "):
            trial.outcome = Outcome(FAILED, why=trial.failure)
        else:
            trial.line = self._make_job(trial).line
            values = settings_of(self._config_of(trial))
            varied = {key: values[key] for key in self.settings(trial)}
            trial.outcome = read_outcome(self.run_of(trial), self._rule(trial), trial.failure, varied)
        trial.step = trial.outcome.step
        trial.loss = trial.outcome.curve[-1][1] if trial.outcome.curve else None
        if trial.outcome.state in ENDED:
            self._journal.tell(trial.arm.study, trial.number, trial.outcome)

    # How processes ended, which a run directory does not hold

    def _read_ends(self) -> dict[str, str]:
        lines = read_lines(self.folder / ENDS)
        pairs = ((line.get("trial"), line.get("failure")) for line in lines)
        return {name: why for name, why in pairs if isinstance(name, str) and isinstance(why, str)}

    def _note(self, trial: Trial, end: End) -> None:
        trial.failure = end.failure
        self._ends.append({"trial": trial.name, "failure": end.failure})
        self._read(trial)

    def _forget_failures(self, begin: int, end: int) -> None:
        for trial in self._round(begin, end):
            if trial.outcome.state == FAILED and trial.failure and not trial.failure.startswith("refused: "):
                trial.failure = ""
                self._ends.append({"trial": trial.name, "failure": ""})
                self._read(trial)


def _follow(trial: Trial, job: Job, records: Records) -> None:
    if trial.outcome.state in ENDED:
        return
    if trial.outcome.state == WAITING and is_run(Path(job.run)):
        trial.outcome = Outcome(RUNNING)
    if records.update() and records.lines:
        trial.step = max(records.lines)
        loss = records.lines[trial.step].get("loss")
        trial.loss = float(loss) if isinstance(loss, int | float) else None


def ranking(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that may win, the best first: complete, and accused by no check. Ties go to the first."""
    ended = [trial for trial in trials if trial.outcome.state == COMPLETE and trial.outcome.value is not None]
    return sorted(ended, key=lambda trial: (trial.outcome.value, trial.number))


def check_points(plan: Plan, file: Path, given: Point) -> list[tuple[Point, RunConfig]]:
    """Return every trial that is known before the first begins, as settings and configuration.

    With TPE these are the corners of the space. file: the run file. given: settings on the command line. Raises
    UserError with a line for each trial that a rule refuses, and if trials would be ranked by different losses.
    """
    sampling = plan.sampling
    known = _corners(plan) if sampling.adapts else points(sampling, 0, sampling.trials)
    wrong: dict[str, str] = {}
    found: list[tuple[Point, RunConfig]] = []
    for arm in plan.arms:
        for number, point in enumerate(known):
            try:
                found.append((point, config_of(file, {**given, **arm.settings, **point})))
            except UserError as error:
                name = "a trial" if sampling.adapts else arm.trial(number)
                for line in error.lines:
                    wrong.setdefault(line, f"{name} ({in_words(point)}): {line}")
    if wrong:
        raise UserError(*wrong.values())
    _require_one_objective(found)
    return found


def _require_one_objective(known: Sequence[tuple[Point, RunConfig]]) -> None:
    """Raise UserError if some trials have a validation loss and others only a training loss."""
    evaluated = {config.eval.every > 0: in_words(point) for point, config in known}
    if len(evaluated) > 1:
        raise UserError(
            f"{COMMAND_LINE}: vary: a trial with eval.every = 0 ({evaluated[False]}) is ranked by its training loss, "
            f"and one with evaluation ({evaluated[True]}) by its validation loss: vary eval.every above 0"
        )


def _corners(plan: Plan, most: int = 256) -> list[Point]:
    varied = plan.sampling.varied
    corners = itertools.islice(itertools.product(*(one.ends for one in varied)), most)
    return [dict(zip((one.key for one in varied), values, strict=True)) for values in corners]
