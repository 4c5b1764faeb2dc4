"""The points that a sweep tries: a function of the space, the seed and the results of earlier rounds alone.

A point is drawn in a study that lives in memory for that alone. So a sweep that was killed while it proposed draws the
same points again, and neither the engine nor the number of jobs has a part in it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.core.config.file import COMMAND_LINE
from lockstep.core.errors import UserError
from lockstep.core.sweep.space import Point, Varied

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial

AUTO, GRID, SOBOL, RANDOM, TPE = "auto", "grid", "sobol", "random", "tpe"
SAMPLERS = (AUTO, GRID, SOBOL, RANDOM, TPE)
# TPE draws at random until this many trials have a value.
STARTUP = 6
DEFAULT_TRIALS = 12
# Trials of a sweep, of each width: each is a process, and its configuration is checked before the first begins.
MOST = 1000


@dataclass(frozen=True)
class Sampling:
    """The settings by which points are drawn. sampler: one of SAMPLERS but AUTO. trials: how many, of each width."""

    varied: tuple[Varied, ...]
    sampler: str
    trials: int
    seed: int

    @property
    def adapts(self) -> bool:
        """Return whether a point depends on what earlier trials have shown."""
        return self.sampler == TPE


def choose(varied: tuple[Varied, ...], sampler: str, trials: int, seed: int) -> Sampling:
    """Resolve `auto`, and the number of trials (0: as many as fit).

    Raises UserError for a grid over a range, and for a grid of another size than asked for.
    """
    ranges = [one.key for one in varied if one.is_range]
    chosen = sampler if sampler != AUTO else SOBOL if ranges else GRID
    size = math.prod(len(one.choices) for one in varied)
    if chosen == GRID:
        if ranges:
            raise UserError(
                f"{COMMAND_LINE}: sampler = grid: {ranges[0]} is a range, and a grid has lists; list its values with "
                "commas, or take sobol"
            )
        if trials not in (0, size):
            raise UserError(
                f"{COMMAND_LINE}: trials = {trials}: the grid has {size} points; leave trials out, or take --sampler "
                "sobol"
            )
        if size > MOST:
            raise UserError(f"{COMMAND_LINE}: the grid has {size:,} points: at most {MOST:,}, or take --sampler sobol")
        trials = size
    return Sampling(varied, chosen, trials or DEFAULT_TRIALS, seed)


def points(sampling: Sampling, begin: int, end: int, history: Sequence[FrozenTrial] = ()) -> list[Point]:
    """Return the points of the trials `begin` … `end` − 1. history: trials of earlier rounds, by number."""
    if sampling.sampler == GRID:
        return _grid(sampling.varied)[begin:end]
    if sampling.sampler == TPE:
        return _by_tpe(sampling, begin, end, history)
    study = in_memory(_independent(sampling))
    space = distributions(sampling.varied)
    drawn = [_as_text(sampling.varied, study.ask(space).params) for _ in range(end)]
    return drawn[begin:]


def _grid(varied: Sequence[Varied]) -> list[Point]:
    keys = [one.key for one in varied]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(one.choices for one in varied))]


def _by_tpe(sampling: Sampling, begin: int, end: int, history: Sequence[FrozenTrial]) -> list[Point]:
    from optuna.samplers import TPESampler

    drawn: list[Point] = []
    space = distributions(sampling.varied)
    study = in_memory(TPESampler(seed=0))
    study.add_trials(list(history))
    for number in range(begin, end):
        # Each trial has a seed of its own: how many are drawn together changes none of them.
        mixed = hashlib.sha256(f"{sampling.seed} {number}".encode()).digest()
        study.sampler = TPESampler(seed=int.from_bytes(mixed[:4], "big"), n_startup_trials=STARTUP)
        drawn.append(_as_text(sampling.varied, study.ask(space).params))
    return drawn


def _independent(sampling: Sampling) -> BaseSampler:
    from optuna.samplers import QMCSampler, RandomSampler

    if sampling.sampler == RANDOM:
        return RandomSampler(seed=sampling.seed)

    class Sobol(QMCSampler):
        # Optuna's own draws the first point at random, as it learns the space from it.
        def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
            return distributions(sampling.varied)

    with warnings.catch_warnings():
        # Optuna calls the sampler experimental; its points are held by a test.
        warnings.simplefilter("ignore")
        return Sobol(scramble=True, seed=sampling.seed)


def in_memory(sampler: BaseSampler) -> Study:
    """Return an empty study that minimises, and is nowhere on the disk."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(sampler=sampler, study_name="sweep")


def distributions(varied: Sequence[Varied]) -> dict[str, BaseDistribution]:
    """Return the space as Optuna has it; the values of a list are texts."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    def one(setting: Varied) -> BaseDistribution:
        if not setting.is_range:
            return CategoricalDistribution(setting.choices)
        if setting.whole:
            return IntDistribution(int(setting.low), int(setting.high), log=setting.log)
        return FloatDistribution(setting.low, setting.high, log=setting.log)

    return {setting.key: one(setting) for setting in varied}


def as_parameters(varied: Sequence[Varied], point: Point) -> dict[str, Any]:
    """Return a point as Optuna has it."""

    def value(setting: Varied) -> Any:
        text = point[setting.key]
        return text if not setting.is_range else int(float(text)) if setting.whole else float(text)

    return {setting.key: value(setting) for setting in varied}


def _as_text(varied: Sequence[Varied], parameters: Mapping[str, Any]) -> Point:
    return {one.key: one.text_of(parameters[one.key]) for one in varied}
