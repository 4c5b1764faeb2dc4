"""The sweep on a terminal: a live table in 80 columns, and the final ranking."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.core.sweep.outcome import COMPLETE, ENDED, FAILED, MARKED, PRUNED, RUNNING
from lockstep.core.sweep.sweep import Trial, ranking

if TYPE_CHECKING:
    from rich.table import Table

# Rows of the live table.
ROWS = 16
# Columns that the settings of a trial have there, and those of a reason.
_SETTINGS, _WHY = 34, 60


def short(key: str) -> str:
    """Return a setting's own name, without its section."""
    return key.rpartition(".")[2]


def settings_in_short(trial: Trial) -> str:
    """Return what is varied in a few columns: `peak_lr 0.001 weight_decay 0.1`."""
    return " ".join(f"{short(key)} {text}" for key, text in trial.point.items())


def counts(trials: Sequence[Trial]) -> str:
    """Return how many trials are in which state."""
    found = Counter(trial.outcome.state for trial in trials)
    order = (COMPLETE, PRUNED, MARKED, FAILED, RUNNING, "waiting")
    return ", ".join(f"{found[state]} {state}" for state in order if found[state])


def live(trials: Sequence[Trial], rows: int = ROWS) -> Table:
    """Return the table while trials run: those that run, then the best, then the rest."""
    best = ranking(trials)
    place = {trial.name: rank for rank, trial in enumerate(best, 1)}
    running = [trial for trial in trials if trial.outcome.state == RUNNING]
    rest = [trial for trial in trials if trial.outcome.state in ENDED and trial.name not in place]
    shown = [*running, *best, *rest][:rows]
    table = _table(f"{len(trials)} trials: {counts(trials)}")
    for trial in shown:
        table.add_row(*_row(trial, place))
    return table


def final(trials: Sequence[Trial]) -> Table:
    """Return the ranking of all trials that ended; those that cannot win stand last, without a place."""
    best = ranking(trials)
    place = {trial.name: rank for rank, trial in enumerate(best, 1)}
    rest = [trial for trial in trials if trial.name not in place]
    table = _table(f"Ranking: {counts(trials)}")
    for trial in (*best, *rest):
        table.add_row(*_row(trial, place))
    return table


def _table(title: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", justify="right")
    table.add_column("trial", no_wrap=True)
    table.add_column("settings", overflow="fold", max_width=_SETTINGS)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("loss", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    return table


def _row(trial: Trial, place: dict[str, int]) -> list[str]:
    value = trial.outcome.value if trial.outcome.value is not None else trial.loss
    rank = str(place[trial.name]) if trial.name in place else ""
    loss = f"{value:.4f}" if value is not None else ""
    name = trial.name.replace("width_", "w").replace("_trial", "").replace("trial_", "")
    said = "" if trial.outcome.state == COMPLETE else trial.outcome.state
    return [rank, name, settings_in_short(trial), str(trial.step), loss, said]


def told(trial: Trial) -> str:
    """Return a line about a trial that begins or has ended."""
    outcome = trial.outcome
    again = f" (went on from a checkpoint {outcome.resumes}×)" if outcome.resumes else ""
    if outcome.state == COMPLETE:
        return f"{trial.name}: {outcome.value:.4f} · {settings_in_short(trial)}{again}"
    if outcome.state in ENDED:
        return f"{trial.name}: {outcome.state}: {outcome.why} · {settings_in_short(trial)}{again}"
    return f"{trial.name}: {trial.line}"
