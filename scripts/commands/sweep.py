"""`lockstep sweep`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from lockstep.core.config.file import COMMAND_LINE
from lockstep.core.errors import UserError
from lockstep.core.files.paths import quoted
from lockstep.core.report.text import plural
from lockstep.core.sinks.lines import tell as print_line
from lockstep.scripts.shared.arguments import parse
from lockstep.scripts.shared.backends import is_built_in, open_candidate
from lockstep.scripts.shared.interrupts import terminated_as_interrupted
from lockstep.scripts.shared.needs import in_words
from lockstep.scripts.shared.open_data import open_data

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.core.config.schema import RunConfig
    from lockstep.core.sweep.local import Engine
    from lockstep.core.sweep.plan import Plan
    from lockstep.core.sweep.space import Point
    from lockstep.core.sweep.sweep import Sweep, Trial

SWEEPS = Path("sweeps")
# The most processes, GPUs or threads of one machine: a larger number is a typing error.
_MOST_OF_A_MACHINE = 1024


@dataclass
class SweepOptions:
    """Train a run file with many combinations of settings, and rank the results.

    Each trial is a run of `lockstep train`, and its command is printed. A trial in which a parity check disagreed never
    wins. To continue a sweep that was stopped or killed, repeat its command. Every setting of a run file is a flag, as
    for lockstep train, and applies to all trials.

    Ends 0 when all trials have ended, 1 if a parity check disagreed in one of them, 2 if it could not run or no trial
    finished, 130 after Ctrl-C.
    """

    config: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
    """run file (TOML)"""
    vary: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(metavar="KEY=VALUES", help_behavior_hint="(required, repeatable)"),
    ] = ()
    """a setting with its values: KEY=LOW:HIGH, KEY=LOW:HIGH:log, or a list KEY=VALUE,VALUE…"""
    trials: Annotated[
        int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: the whole grid if all are lists, else 12)")
    ] = None
    """number of trials at each width"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: sweeps/NAME)")] = None
    """folder of the sweep: the runs (trials/), the page (sweep.html) and the study"""
    sampler: Literal["auto", "grid", "sobol", "random", "tpe"] = "auto"
    """how points are chosen: grid (all combinations of the lists), sobol (Sobol's sequence), random, or tpe (near good
    points of earlier rounds). auto: grid if all are lists, else sobol"""
    pruner: Literal["none", "median", "hyperband"] = "none"
    """stop trials early whose loss is above that of earlier rounds"""
    round: int = 4
    """with a pruner or tpe: number of trials of a width that are proposed together and not compared with each other"""
    draw_seed: int = 0
    """seed of the chosen points"""
    widths: Annotated[str, tyro.conf.arg(metavar="W,W…", help_behavior_hint="(default: the run file's)")] = ""
    """run the sweep at each of these widths (model.hidden; heads and MLP in proportion)"""
    width_rule: Literal["inverse", "constant"] = "inverse"
    """with widths: scale the matrices' learning rate by 1/width (optim.base_width = the first width), or keep it"""
    engine: Literal["local", "ray"] = "local"
    """where trials run: in processes of this machine, or where Ray Tune places them"""
    jobs: int = 0
    """number of trials at a time; 0: one, or with ray as many as fit"""
    gpus: int = 0
    """GPUs of each trial; 0: with local, all visible ones"""
    threads: int = 0
    """CPU threads of each trial, and with ray its cores; 0: the environment's number (ray: 1 core)"""
    ray_address: Annotated[str, tyro.conf.arg(metavar="ADDRESS", help_behavior_hint="(default: a Ray of its own)")] = ""
    """with ray: address of a running cluster, or auto for the one on this machine"""
    backend: Annotated[str, tyro.conf.arg(metavar="BACKEND", help_behavior_hint="(default: torch)")] = ""
    """trainer, as for lockstep train"""
    retry_failed: bool = False
    """repeat failed trials"""


def main(argv: list[str]) -> int:
    """Check the arguments and the data, make the folder, run the trials, then write the page and the ranking."""
    # tyro knows only the settings that help lists.
    asks = bool({"-h", "--help"} & set(argv))
    options, given = parse(SweepOptions, "sweep", argv, with_settings=True, shown=lambda key: not asks)
    _check(options)
    plan, folder = _plan(options, given)
    from lockstep.core.sweep.plan import check_folder, write_plan
    from lockstep.core.sweep.sweep import Sweep, check_points

    check_folder(folder, plan)
    _check_places(folder)
    _check_data(check_points(plan, options.config, given), options.config, given)
    _check_backend(options.backend)
    _check_gpus(options)
    engine = _engine(options, folder)
    engine.start()
    write_plan(folder, plan)
    with Sweep(folder, plan) as sweep, terminated_as_interrupted():
        return _run(sweep, engine, options, argv)


def _check(options: SweepOptions) -> None:
    from lockstep.core.sweep.propose import MOST

    limits = {
        "trials": (1, MOST),
        "round": (1, MOST),
        "jobs": (0, _MOST_OF_A_MACHINE),
        "gpus": (0, _MOST_OF_A_MACHINE),
        "threads": (0, _MOST_OF_A_MACHINE),
        "draw_seed": (0, 2**32 - 1),
    }
    for name, (least, most) in limits.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise UserError(f"{COMMAND_LINE}: {name} = {value}: {bound}")
    if options.ray_address and options.engine != "ray":
        raise UserError(f"{COMMAND_LINE}: ray_address: only with --engine ray")
    if find_spec("optuna") is None:
        raise UserError(in_words("sweep", ["optuna"]))
    if options.engine == "ray" and find_spec("ray") is None:
        raise UserError(f"{in_words('sweep --engine ray', ['ray[tune]'])}; --engine local needs no Ray")


def _plan(options: SweepOptions, given: Mapping[str, str]) -> tuple[Plan, Path]:
    from lockstep.core.config.file import load_config
    from lockstep.core.sweep.plan import Plan
    from lockstep.core.sweep.propose import choose
    from lockstep.core.sweep.space import read_space
    from lockstep.core.sweep.widths import read_widths, require_free

    varied = read_space(options.vary)
    for one in varied:
        if one.key in given:
            raise UserError(f"{COMMAND_LINE}: {one.key} is varied and also given as a flag; leave one of the two out")
    widths = read_widths(options.widths)
    if widths:
        require_free(varied)
    sampling = choose(varied, options.sampler, options.trials or 0, options.draw_seed)
    config = load_config(options.config, given)
    plan = Plan(
        config,
        sampling,
        options.pruner,
        options.round,
        widths,
        options.width_rule if widths else "",
        options.backend,
        options.threads,
    )
    return plan, options.out or SWEEPS / config.name


def _check_places(folder: Path) -> None:
    """Raise UserError if a file or folder is in the way of the sweep's output, which would end it after its trials."""
    from lockstep.core.sweep.page import PAGE
    from lockstep.core.sweep.results import RESULTS
    from lockstep.core.sweep.sweep import LOGS, TRIALS

    for name in (TRIALS, LOGS):
        if (folder / name).exists() and not (folder / name).is_dir():
            raise UserError(f"{folder / name} is a file, and the sweep has a folder there; remove it")
    for name in (PAGE, RESULTS):
        if (folder / name).exists() and not (folder / name).is_file():
            raise UserError(f"{folder / name} is not a file, and the sweep writes one there; remove it")


def _check_data(known: Sequence[tuple[Point, RunConfig]], file: Path, given: Mapping[str, str]) -> None:
    """Raise UserError if the data of a known trial is not there."""
    folders = {config.data.folders: (point, config) for point, config in reversed(known)}
    for point, config in reversed(folders.values()):
        varied = {key: text for key, text in point.items() if key.startswith("data.")}
        open_data(config, file, {**given, **varied})


def _check_backend(name: str) -> None:
    """Raise UserError if a user's backend cannot be opened here, because every trial would then fail."""
    if name and not is_built_in(name):
        open_candidate(name)


def _check_gpus(options: SweepOptions) -> None:
    """Raise UserError if this machine has fewer GPUs than the trials need, which would train on the CPU or fail.

    With Ray, the engine reads the GPUs of the cluster.
    """
    if not options.gpus or options.engine != "local":
        return
    from torch import cuda

    jobs, there = max(1, options.jobs), cuda.device_count()
    if jobs * options.gpus > there:
        raise UserError(
            f"{COMMAND_LINE}: gpus = {options.gpus}: {plural(jobs, 'trial')} at a time would need "
            f"{plural(jobs * options.gpus, 'GPU')}, and torch finds {there} here; leave --gpus out to train on what "
            "there is"
        )


def _engine(options: SweepOptions, folder: Path) -> Engine:
    from lockstep.core.sweep.local import Local
    from lockstep.core.sweep.ray_engine import OnRay

    if options.engine == "ray":
        return OnRay(folder, options.jobs, options.gpus, max(1, options.threads), options.ray_address)
    return Local(max(1, options.jobs), options.gpus)


def _run(sweep: Sweep, engine: Engine, options: SweepOptions, argv: list[str]) -> int:
    from lockstep.core.sinks.terminal import open_console
    from lockstep.core.sweep.outcome import MARKED
    from lockstep.core.sweep.page import write_page
    from lockstep.core.sweep.sweep import ranking
    from lockstep.core.sweep.table import final

    console = open_console()
    try:
        with _shown(console, sweep) as told:
            sweep.run(engine, told, options.retry_failed)
    except KeyboardInterrupt:
        write_page(sweep)
        print_line(console, f"stopped; the same command continues {quoted(sweep.folder)}")
        return 130
    console.print(final(sweep.trials))
    page = write_page(sweep)
    for arm in sweep.plan.arms:
        best = ranking(sweep.of(arm))
        said = "" if arm.width is None else f" at width {arm.width}"
        if best:
            print_line(console, f"best{said}: {best[0].outcome.value:.4f}, {best[0].name}: {best[0].line}")
        else:
            print_line(console, f"best{said}: none: no trial finished without a check that disagreed")
    print_line(console, f"page: {page}")
    if not ranking(sweep.trials):
        raise UserError(f"no trial of {sweep.folder} finished without a check that disagreed; {page} shows why")
    return int(any(trial.outcome.state == MARKED for trial in sweep.trials))


@contextmanager
def _shown(console: Console, sweep: Sweep) -> Iterator[Callable[[Trial | None], None]]:
    """Yield a function that shows trials: lines, and on a terminal a live table below them."""
    from rich.live import Live

    from lockstep.core.sweep.outcome import ENDED
    from lockstep.core.sweep.page import write_page
    from lockstep.core.sweep.table import live, told

    with Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else _Quiet() as shown:

        def tell(trial: Trial | None) -> None:
            if trial is not None:
                print_line(console, told(trial))
                if trial.outcome.state in ENDED:
                    write_page(sweep)
            if isinstance(shown, Live):
                shown.update(live(sweep.trials), refresh=True)

        yield tell


class _Quiet:
    """A stand-in for the live table where the output is a file or a pipe."""

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        return None
