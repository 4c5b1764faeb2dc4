"""Print the story of `lockstep demo`: the planted fault, the losses, the findings of the checks, and next commands."""

from __future__ import annotations

import os
import shlex
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.sinks.lines import say, tell
from lockstep.core.sinks.phrases import bounds, duration, place_of
from lockstep.scripts.shared.demo_run import CONFIG, FAULTY, HONEST, RUNS, Trained, faulty_backend

if TYPE_CHECKING:
    from rich.console import Console

# Steps whose losses are shown, as fractions of the run.
_SHOWN = (0, 0.25, 0.5, 0.75, 1)


def print_beginning(console: Console) -> None:
    """Print the introduction."""
    say(console, "Lockstep's demo: two tiny models train, one of them with a fault", "bold")
    say(console, "planted: RoPE's cos and sin are rounded to bf16 (a bug of transformers, #29285)")


def print_data(console: Console, tokens: int) -> None:
    """Print the number of tokens that the models train on."""
    say(console, f"data: {tokens:,} tokens of Lockstep's own sources; each run takes a minute …")


def print_losses(console: Console, honest: Trained, faulty: Trained) -> None:
    """Print losses of both runs side by side."""
    say(console, "")
    say(console, "The loss shows nothing:", "bold")
    say(console, f"  {'step':>4}  {'honest':>8}  {'with a fault':>12}  {'difference':>10}")
    last = min(len(honest.losses), len(faulty.losses)) - 1
    for at in dict.fromkeys(round(share * last) for share in _SHOWN):
        (step, right), (_, wrong) = honest.losses[at], faulty.losses[at]
        say(console, f"  {step:>4}  {right:>8.4f}  {wrong:>12.4f}  {wrong - right:>+10.6f}")


def print_checks(console: Console, honest: Trained, faulty: Trained) -> None:
    """Print what the checks of both runs found, and the first origin with its measure and bound."""
    say(console, "")
    say(console, "A check of a step against the JAX reference shows it:", "bold")
    for name, run in ((HONEST, honest), (FAULTY, faulty)):
        agreed = sum(verdict == "agreed" for _, verdict, _ in run.checks)
        style = "bold red" if run.disagreed else "green"
        say(console, f"  {name}: {agreed} of {len(run.checks)} checks agreed", style)
    first = next(((step, origin) for step, _, origin in faulty.checks if origin is not None), None)
    if first is None:
        return
    step, origin = first
    say(console, f"  first bad step {step}; origin: {place_of(origin)}")
    if origin.measures:
        worst = origin.worst
        limits = bounds(worst.low, worst.high)
        say(console, f"  {worst.name.replace('_', ' ')} {worst.value:,.4g}; allowed {limits} ({worst.basis})")


def write_reports(folder: Path) -> Path:
    """Write the reports of both runs; return the address of the faulty run's."""
    from lockstep.core.report.build import write_report

    write_report(folder / RUNS / HONEST)
    return write_report(folder / RUNS / FAULTY).resolve()


def print_end(console: Console, folder: Path, report: Path, seconds: float) -> None:
    """Print where the report is, how long it took, and commands that do the same by hand."""
    config, runs = shlex.quote(str(folder / CONFIG)), folder / RUNS
    both = shlex.join([str(runs / HONEST), str(runs / FAULTY)])
    say(console, "")
    tell(console, f"report: {report}", "bold")
    say(console, f"It took {duration(seconds)}. By hand:")
    for line in (
        f"lockstep parity {config}",
        f"lockstep parity {config} --candidate {faulty_backend()}",
        f"lockstep report {both}",
    ):
        tell(console, f"  {line}")


def open_in_browser(report: Path, console: Console) -> None:
    """Open the report if stdout is a terminal on a desktop."""
    desktop = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    if console.is_terminal and desktop:
        webbrowser.open(report.as_uri())
