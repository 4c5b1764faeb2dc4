"""`lockstep report`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lockstep.core.config.file import COMMAND_LINE
from lockstep.core.errors import UserError, printable
from lockstep.core.files.paths import path_problem
from lockstep.scripts.shared.arguments import check_file, parse

COMPARISON = Path("report_compare.html")


@dataclass
class Report:
    """Write a run's report: one self-contained HTML file with curves and the parity heatmap.

    Of several runs (2 to 8), a comparison: curves laid over each other, figures, settings that differ, and where the
    curves part from those of the first.
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


def main(argv: list[str]) -> int:
    """Write the report, or the comparison, and say where it is."""
    from lockstep.core.report import write_comparison, write_report

    options, _ = parse(Report, "report", argv, with_settings=False)
    if not options.runs:
        raise UserError(f"{COMMAND_LINE}: RUN is missing: lockstep report RUN … (--help says more)")
    for text in options.runs:
        if problem := path_problem(text) or (not text and "no path"):
            raise UserError(f"{COMMAND_LINE}: RUN = {text!r}: {problem}")
    check_file("out", options.out)
    runs = [Path(text) for text in options.runs]

    def warn(note: str) -> None:
        print(f"lockstep: {printable(note)}", file=sys.stderr)

    if len(runs) == 1:
        print(write_report(runs[0], options.out, warn))
    else:
        print(write_comparison(runs, options.out or COMPARISON, warn))
    return 0
