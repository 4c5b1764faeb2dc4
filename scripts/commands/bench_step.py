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

    Each row runs in a process of its own, and the JSON is written after each row; --resume continues an earlier run. A
    row that by `lockstep plan` does not fit into the GPU's memory is left out. Ends 0 if every row was measured or left
    out, 2 if one failed.
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
    """names of the rows to measure"""
    repeat: int = 10
    """timed steps of a row"""
    warmup: int = 3
    """warm-up steps of a row; the first compiles"""
    json: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("bench_step.json")
    """file of the results; the output of the processes goes into a .log beside it"""
    resume: bool = False
    """skip rows that the file already has for the same device, versions and run file"""
    ignore_plan: bool = False
    """also start rows that do not fit into memory by the plan"""
    minutes: float = 0.0
    """time limit: start no row that is expected to end after it; 0 = no limit"""
    page: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: not written)")] = None
    """measure nothing; write a Markdown page of the results"""


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
        raise UserError("command line: repeat and warmup: each must be at least 1")
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
    # A wrong run file or row is reported before anything is started.
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
    from lockstep.core.sinks.lines import tell
    from lockstep.core.sinks.terminal import open_unwrapped

    started = time.monotonic()
    console = open_unwrapped()
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
        # A limit that is already used up must not become 0, which means no limit.
        seconds = max(left, 1e-3) if options.minutes else 0.0
        plan = Plan(options.warmup, options.repeat, seconds, options.resume, options.ignore_plan)
        done = []
        for result in measure_rows(
            rows, series, lambda row: load_config(path, {**given, **row.overrides(kind)}), ask, plan
        ):
            save_results(options.json, results)
            done.append(result)
            tell(console, _line(result))
    print_table(console, rows, series)
    if waiting := to_do(rows, series, True, options.ignore_plan):
        announce(f"lockstep: time limit reached; rows left for --resume: {names(waiting)}")
    failed = [result["row"] for result in done if result["status"] == "failed"]
    if failed:
        complain(f"failed: {', '.join(failed)}; their output is in {log.name}")
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
    """Print the rows, the reason of each row without a figure, and the machine and versions."""
    from lockstep.core.bench.page import HEADERS, about, cells, remarks
    from lockstep.core.bench.results import result_of
    from lockstep.core.sinks.lines import tell
    from lockstep.core.sinks.tables import print_fitting

    length = series["config"]["sequence_length"]
    drawn = [cells(row, result_of(series, row.name), length) for row in rows]
    print_fitting(console, "Whole steps (* published under other conditions)", HEADERS, drawn)
    for line in [*remarks(rows, series), *about(series)]:
        tell(console, line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
