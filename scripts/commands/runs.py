"""`lockstep runs`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from lockstep.core.config.file import COMMAND_LINE
from lockstep.core.errors import UserError, printable
from lockstep.core.sinks.lines import complain
from lockstep.scripts.shared.arguments import parse
from lockstep.scripts.shared.outputs import check_output

if TYPE_CHECKING:
    from lockstep.core.overview.find import Found
    from lockstep.core.overview.row import Row

STDOUT = Path("-")
# Unreadable folders that are named; the rest are counted.
_NAMED = 3


@dataclass
class Runs:
    """List every run below a folder: state, steps, loss, throughput, verdicts, and the settings that differ.

    Losses are in nats: the mean of the last 20 steps, and the last validation loss; tok/s is the median of those steps.
    Checks: ✓ agreed, ✕ disagreed, ? could not tell or skipped. The last column is the age of the last record.

    States: running (a process has the run's lock), ended (all steps are done), stopped (by Ctrl-C, or by a check that
    disagreed), failed (an error ended it), killed (it ended without a message), not begun, unknown.
    """

    folder: Annotated[
        Path, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]", help_behavior_hint="(default: runs)")
    ] = Path("runs")
    """folder to search, with all folders below it; symbolic links are not followed"""
    sort: Annotated[str, tyro.conf.arg(metavar="KEY")] = "path"
    """figure (path, name, state, steps, loss, val, speed, verdict, agreed, disagreed, branch, created, written) or
    setting, such as optim.peak-lr, to sort by; runs without a value come last"""
    descending: bool = False
    """largest first"""
    where: Annotated[
        tuple[str, ...],
        tyro.conf.UseAppendAction,
        tyro.conf.arg(metavar="KEY>VALUE", help_behavior_hint="(default: all runs)"),
    ] = ()
    """condition with = != < <= > or >= on a figure or a setting, such as 'optim.peak-lr>1e-3' or state=running; may be
    given several times"""
    baseline: Annotated[str | None, tyro.conf.arg(metavar="RUN", help_behavior_hint="(default: each other)")] = None
    """path or name of a listed run; the others' settings are compared with its settings"""
    branches: bool = False
    """also list what resumes and rollbacks left in branches/ of their runs"""
    page: Annotated[Path | None, tyro.conf.arg(metavar="FILE.html", help_behavior_hint="(default: not written)")] = None
    """write a page instead of the table; it sorts and filters in a browser"""
    json: Annotated[
        Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: not written; - is stdout)")
    ] = None
    """write the rows as JSON instead of the table"""


def main(argv: list[str]) -> int:
    """Read the runs, then print them, or write a page or JSON."""
    from lockstep.core.files.atomic import write_atomically
    from lockstep.core.overview.columns import chosen, condition, in_order
    from lockstep.core.overview.differences import differing, named
    from lockstep.core.overview.export import json_of
    from lockstep.core.overview.find import find_runs
    from lockstep.core.overview.row import read_row, rows_of_branches

    options, _ = parse(Runs, "runs", argv, with_settings=False)
    check_output("page", options.page)
    if options.json != STDOUT:
        check_output("json", options.json)
    if options.page == STDOUT:
        raise UserError(f"{COMMAND_LINE}: page = -: a page is written to a file; --json - writes to stdout")
    if options.page and options.json and options.page.absolute() == options.json.absolute():
        raise UserError(f"{COMMAND_LINE}: page and json name one file, {options.page}: give each its own")
    conditions = [condition(text) for text in options.where]
    if not options.folder.is_dir():
        raise UserError(f"{options.folder} is not a folder; name a folder of runs")
    found = find_runs(options.folder)
    rows = [read_row(options.folder, path) for path in found.runs]
    baseline = named(rows, options.baseline) if options.baseline is not None else None
    if options.branches:
        rows = [each for row in rows for each in (row, *rows_of_branches(options.folder, row))]
    rows = in_order(chosen(rows, conditions), options.sort, options.descending)
    keys = differing(rows, baseline)
    if options.page:
        from lockstep.core.overview.page import build_page

        write_atomically(options.page, [build_page(options.folder, rows, keys, baseline).encode()])
        print(options.page)
    if options.json:
        text = json.dumps(json_of(rows, keys), indent=2, allow_nan=False) + "\n"
        if options.json == STDOUT:
            sys.stdout.write(text)
        else:
            write_atomically(options.json, [text.encode()])
    if not options.page and not options.json:
        _print(options.folder, rows, keys, baseline, len(found.runs))
    for line in _left_out(found):
        complain(line)
    return 0


def _print(folder: Path, rows: list[Row], keys: list[str], baseline: Row | None, all_runs: int) -> None:
    from lockstep.core.overview.table import print_rows
    from lockstep.core.sinks.terminal import open_unwrapped

    if rows:
        print_rows(open_unwrapped(), rows, keys, baseline)
    elif all_runs:
        print(f"none of {all_runs:,} runs meets this")
    else:
        print(f"no run below {printable(str(folder))}")


def _left_out(found: Found) -> Iterator[str]:
    """Yield lines on folders that were not searched."""
    if found.links:
        yield f"symbolic links to folders that were not followed: {found.links:,}"
    for path in found.unread[:_NAMED]:
        yield f"cannot read the folder {printable(str(path))}"
    if len(found.unread) > _NAMED:
        yield f"… and {len(found.unread) - _NAMED:,} other folders"
