"""`lockstep demo`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lockstep.core.errors import UserError
from lockstep.scripts.shared.arguments import parse

OUT = Path("lockstep-demo")


@dataclass
class Demo:
    """Plant a fault in a tiny trainer and let a check find it: `lockstep demo`.

    Two tiny models train for 40 steps on Lockstep's own sources, on the CPU; one of them has a fault that the loss does
    not show. The command writes the report of that run, and opens it if there is a browser. It needs no network and no
    data. Ends 0 if the honest run agreed and the fault was found, 1 if the honest run disagreed, 2 if it could not.
    """

    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = OUT
    """folder for the data, both runs and the report; only an earlier demo in it is replaced"""
    no_open: bool = False
    """do not open the report"""


def main(argv: list[str]) -> int:
    """Prepare the data, train twice, write the report, and print the results."""
    from lockstep.core.sinks.terminal import open_console
    from lockstep.scripts.shared import demo_story
    from lockstep.scripts.shared.demo_run import FAULTY, HONEST, claimed, prepared, trained

    options, _ = parse(Demo, "demo", argv, with_settings=False)
    started = time.perf_counter()
    folder = claimed(options.out)
    console = open_console()
    demo_story.print_beginning(console)
    demo_story.print_data(console, prepared(folder))
    honest, faulty = trained(folder, HONEST), trained(folder, FAULTY)
    demo_story.print_losses(console, honest, faulty)
    demo_story.print_checks(console, honest, faulty)
    report = demo_story.write_reports(folder)
    demo_story.print_end(console, folder, report, time.perf_counter() - started)
    if not options.no_open:
        demo_story.open_in_browser(report, console)
    if honest.disagreed:
        return 1
    if not faulty.disagreed:
        raise UserError(f"the planted fault was not found; the run's output is in {folder / f'{FAULTY}.log'}")
    return 0
