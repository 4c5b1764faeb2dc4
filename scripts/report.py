"""`lockstep report`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from scripts.arguments import parse


@dataclass
class Report:
    """Write a run's report: one self-contained HTML file with curves and the parity heatmap."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """run directory"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: RUN/report.html)")] = None
    """file to write"""


def main(argv: list[str]) -> int:
    """Write the report and say where it is."""
    from core.report import write_report

    options, _ = parse(Report, "report", argv, with_settings=False)
    print(write_report(options.run, options.out, lambda note: print(f"lockstep: {note}", file=sys.stderr)))
    return 0
