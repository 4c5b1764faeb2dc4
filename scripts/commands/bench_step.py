"""`lockstep bench step`."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lockstep.core.errors import UserError
from lockstep.core.sinks.lines import announce, complain
from lockstep.scripts.shared.arguments import check_file, parse
from lockstep.scripts.shared.installation import HOME, shipped_config

if TYPE_CHECKING:
    from typing import Any

    from rich.console import Console

    from lockstep.core.bench.rows import Row
    from lockstep.core.bench.suite import Ask

# By the device's kind.
CONFIGS = {"cuda": shipped_config("llama-1b"), "cpu": shipped_config("bench-tiny")}
# Starting Python and torch, and a few seconds of products.
DEVICE_LIMIT = 300.0


@dataclass
class Bench:
    """Time whole training steps, row by row, beside the published figures and the floor: `lockstep bench step`.

    Each row runs in a process of its own, and the JSON is written after each; --resume goes on where it ended. A row
    that cannot fit into the GPU's memory by `lockstep plan` is not started. Ends 0 if every row was measured or cannot
    run here or does not fit into memory, 2 if one failed.
    """

    config: Annotated[
        Path | None,
        tyro.conf.Positional,
        tyro.conf.arg(
            metavar="CONFIG",
            help_behavior_hint="(default: configs/llama-1b.toml on CUDA, configs/bench-tiny.toml else)",
        ),
    ] = None
    """run file (TOML): model, sequence length and optimizer; rows set the rest"""
    rows: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME…", help_behavior_hint="(default: all)")] = ()
    """rows to measure, by name"""
    repeat: int = 10
    """steps of a row that count"""
    warmup: int = 3
    """steps of a row before them; the first compiles"""
    json: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("bench_step.json")
    """where results are kept; what processes print goes beside it, as .log"""
    resume: bool = False
    """leave out rows that are there for the same device, versions and run file"""
    ignore_plan: bool = False
    """measure rows too that cannot fit into memory by the plan; they are left out else"""
    minutes: float = 0.0
    """start no row that would not end in time, as far as is known; 0 = no limit"""
    page: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: not written)")] = None
    """measure nothing: write the results as a page in Markdown"""


def _bears_on_rows(key: str) -> bool:
    return key in ("seed", "train.sequence_length", "loss.z_loss") or key.startswith(("model.", "optim."))


def main(argv: list[str]) -> int:
    """Measure, print the table; or write the page."""
    from lockstep.core.bench.files import write_page
    from lockstep.core.bench.page import page
    from lockstep.core.bench.results import load_results
    from lockstep.core.bench.rows import chosen
    from lockstep.core.config.file import load_config

    options, given = parse(Bench, "bench step", argv, with_settings=True, shown=_bears_on_rows)
    if options.repeat < 1 or options.warmup < 1:
        raise UserError("command line: repeat and warmup: at least one step each is needed")
    if not (math.isfinite(options.minutes) and options.minutes >= 0):
        raise UserError(f"command line: minutes = {options.minutes}: must be a number of at least 0")
    rows = chosen(options.rows)
    check_file("json", options.json)
    check_file("page", options.page)
    results = load_results(options.json)
    if options.page:
        write_page(options.page, page(results))
        print(options.page)
        return 0
    # Their faults are reported before anything is started.
    for path in [options.config] if options.config else CONFIGS.values():
        load_config(path, given)
    return measure(options, given, rows, results)


def measure(options: Bench, given: dict[str, str], rows: list[Row], results: dict[str, Any]) -> int:
    """Measure the rows; every result is in the file before the next row begins."""
    import time

    from lockstep.core.bench.results import save_results, series_of
    from lockstep.core.bench.rows import bench_config, names
    from lockstep.core.bench.suite import Plan, Worker, measure_rows, to_do
    from lockstep.core.config.file import load_config
    from lockstep.core.sinks.terminal import open_console

    started = time.monotonic()
    console = open_console()
    with options.json.with_suffix(".log").open("a") as log:
        ask = Worker([sys.executable, "-P", "-m", "lockstep.scripts.shared.bench_worker"], HOME, log)
        found = _answer(ask, "device")
        kind = found["device"]["kind"]
        path = options.config or CONFIGS[kind]
        config = load_config(path, {**given, "device": kind})
        series = series_of(results, found["device"], found["versions"], bench_config(config))
        if series["floor"] is None:
            series["floor"] = _answer(ask, "floor")["floor"]
            save_results(options.json, results)
        left = options.minutes * 60 - (time.monotonic() - started) if options.minutes else 0.0
        # A limit that is used up already is none that is not set.
        seconds = max(left, 1e-3) if options.minutes else 0.0
        plan = Plan(options.warmup, options.repeat, seconds, options.resume, options.ignore_plan)
        done = []
        for result in measure_rows(
            rows, series, lambda row: load_config(path, {**given, **row.overrides(kind)}), ask, plan
        ):
            save_results(options.json, results)
            done.append(result)
            console.print(_line(result), markup=False, soft_wrap=True)
    print_table(console, rows, series)
    if waiting := to_do(rows, series, True, options.ignore_plan):
        announce(f"lockstep: the time is up; left for --resume: {names(waiting)}")
    failed = [result["row"] for result in done if result["status"] == "failed"]
    if failed:
        complain(f"failed: {', '.join(failed)}; what they said is in {log.name}")
    return 2 if failed else 0


def _answer(ask: Ask, job: str) -> dict[str, Any]:
    found = ask({"job": job}, DEVICE_LIMIT)
    if found["status"] != "measured":
        raise UserError(f"the bench could not measure this device: {found['reason']}")
    return found


def _line(result: dict[str, Any]) -> str:
    if result["status"] != "measured":
        return f"{result['row']}: {result['status'].replace('_', ' ')}: {result['reason']}"
    return f"{result['row']}: {result['median']:.4g} s a step, {result['tokens_per_second']:,.0f} tokens/s"


def print_table(console: Console, rows: list[Row], series: dict[str, Any]) -> None:
    """Print the rows, why some have no figure, and on what this was measured."""
    from lockstep.core.bench.page import HEADERS, about, cells, remarks
    from lockstep.core.bench.results import result_of
    from lockstep.core.sinks.tables import table
    from lockstep.core.sinks.terminal import open_console

    length = series["config"]["sequence_length"]
    wide = console if console.width >= 230 else open_console(230)
    drawn = [cells(row, result_of(series, row.name), length) for row in rows]
    wide.print(table("Whole steps (* published under other conditions)", HEADERS, drawn), soft_wrap=False)
    for line in [*remarks(rows, series), *about(series)]:
        console.print(line, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
