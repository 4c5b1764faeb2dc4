"""`lockstep report`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lockstep.core.config.file import COMMAND_LINE
from lockstep.core.errors import UserError, printable
from lockstep.core.files.paths import path_problem
from lockstep.core.sinks.lines import complain
from lockstep.scripts.shared.arguments import parse
from lockstep.scripts.shared.outputs import check_output

COMPARISON = Path("report_compare.html")
_PORTS = 65_536


@dataclass
class Report:
    """Write a run's report: one self-contained HTML file with curves and the parity heatmap.

    For 2 to 8 runs, write a comparison: overlaid curves, figures, settings that differ, and the step at which each
    run's curves leave those of the first.
    """

    runs: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN …", help_behavior_hint="(required)")
    ] = ()
    """run directories"""
    out: Annotated[
        Path | None,
        tyro.conf.arg(metavar="FILE", help_behavior_hint=f"(default: RUN/report.html; of several, {COMPARISON})"),
    ] = None
    """file to write"""
    watch: bool = False
    """serve the report of a run on 127.0.0.1 instead, and update it as records arrive; Ctrl-C ends it"""
    port: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: a free one)")] = None
    """with --watch: port of 127.0.0.1"""


def main(argv: list[str]) -> int:
    """Write the report or the comparison, and print its path."""
    from lockstep.core.report.build import write_report
    from lockstep.core.report.compare import write_comparison

    options, _ = parse(Report, "report", argv, with_settings=False)
    if not options.runs:
        raise UserError(f"{COMMAND_LINE}: RUN is missing: lockstep report RUN … (see --help)")
    for text in options.runs:
        if problem := path_problem(text) or (not text and "no path"):
            raise UserError(f"{COMMAND_LINE}: RUN = {text!r}: {problem}")
    check_output("out", options.out)
    if options.watch:
        return _watch(options)
    if options.port is not None:
        raise UserError(f"{COMMAND_LINE}: --port needs --watch")
    runs = [Path(text) for text in options.runs]

    def warn(note: str) -> None:
        complain(printable(note))

    if len(runs) == 1:
        print(write_report(runs[0], options.out, warn))
    else:
        print(write_comparison(runs, options.out or COMPARISON, warn))
    return 0


def _watch(options: Report) -> int:
    """Serve the page of one run until Ctrl-C."""
    from lockstep.core.live.server import serve
    from lockstep.core.live.snapshot import require_watchable
    from lockstep.scripts.shared.interrupts import terminated_as_interrupted

    if len(options.runs) > 1 or options.out:
        raise UserError(f"{COMMAND_LINE}: --watch serves one run and writes no file: lockstep report --watch RUN")
    port = options.port or 0
    if not 0 <= port < _PORTS:
        raise UserError(f"{COMMAND_LINE}: port = {port}: a port is a number from 1 to {_PORTS - 1}")
    run = Path(options.runs[0])
    require_watchable(run)

    def say(address: str) -> None:
        print(f"{printable(str(run))}: {address} (Ctrl-C ends it)", flush=True)

    with terminated_as_interrupted(), suppress(KeyboardInterrupt):
        serve(run, port, say)
    return 0
