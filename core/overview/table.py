"""Rows as a table of the terminal: figures in columns, differences in a column or, where there is no room, below."""

from __future__ import annotations

import math
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.core.errors import printable
from lockstep.core.overview.differences import told
from lockstep.core.overview.row import FAILED, KILLED, RUNNING, STATES, UNKNOWN, Row
from lockstep.core.report.text import count, number

if TYPE_CHECKING:
    from rich.console import Console

# From so many columns on the differences are a column of the table.
WIDE = 130
# Differences that are named of one run.
NAMED = 6
_STYLES = {RUNNING: "cyan", FAILED: "red", KILLED: "red", UNKNOWN: "yellow"}
_HEADERS = ("run", "state", "steps", "loss", "val", "tok/s", "checks", "ago")


def print_rows(console: Console, rows: Sequence[Row], keys: Sequence[str], baseline: Row | None) -> None:
    """Print the table, then what there is no column for: differences, ends, history and problems of runs."""
    from rich.table import Table
    from rich.text import Text

    wide = console.width >= WIDE
    drawn = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for header in (*_HEADERS, *(("differs in",) if wide and keys else ())):
        right = header in ("steps", "loss", "val", "tok/s")
        folds = header in ("run", "differs in")
        drawn.add_column(header, justify="right" if right else "left", no_wrap=not folds, overflow="fold")
    now = time.time()
    for row in rows:
        cells = cells_of(row, now)
        style = {1: _STYLES.get(row.state, ""), 6: "bold red" if row.checks["disagreed"] else ""}
        texts = [Text(printable(cell), style.get(place, "")) for place, cell in enumerate(cells)]
        if wide and keys:
            texts.append(Text(printable(differences_of(row, keys, baseline))))
        drawn.add_row(*texts)
    console.print(drawn)
    console.print(summary(rows), style="dim")
    below: list[tuple[str, str]] = []
    for row in rows:
        said = [] if wide else [differences_of(row, keys, baseline)]
        below += [(row.path, line) for line in (*said, *remarks(row)) if line]
    if below:
        console.print()
        for path, line in below:
            for each in textwrap.wrap(printable(f"{path}: {line}"), max(console.width - 1, 20), subsequent_indent="  "):
                console.print(each, soft_wrap=True)


def cells_of(row: Row, now: float) -> list[str]:
    """Return the cells of a row under `_HEADERS`. now: seconds since 1970."""
    tail = row.tail
    steps = "–" if tail.step is None else count(tail.step)
    if row.planned is not None and row.planned != tail.step:
        steps += f"/{count(row.planned)}"
    return [
        row.path,
        row.state,
        steps,
        loss_text(tail.loss),
        loss_text(tail.validation[1] if tail.validation else None),
        count(tail.speed) if tail.speed is not None else "–",
        verdicts(row.checks),
        ago(tail.written, now),
    ]


def verdicts(checks: Counter[str]) -> str:
    """Return `12✓ 1✕ 2?`: agreed, disagreed, and the rest (could not tell, skipped, damaged)."""
    rest = checks.total() - checks["agreed"] - checks["disagreed"]
    parts = ((checks["agreed"], "✓"), (checks["disagreed"], "✕"), (rest, "?"))
    return " ".join(f"{times:,}{mark}" for times, mark in parts if times) or "–"


def ago(written: float | None, now: float) -> str:
    """Return how long ago something was written: `12 s`, `3 min`, `5 h`, `9 d`."""
    if written is None:
        return "–"
    seconds = max(now - written, 0.0)
    for size, unit, most in ((1, "s", 120), (60, "min", 120), (3600, "h", 48)):
        if seconds / size < most:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:,.0f} d"


def differences_of(row: Row, keys: Sequence[str], baseline: Row | None, most: int = NAMED) -> str:
    """Return `optim.peak_lr 0.001, seed 1`, at most `most` of them."""
    found = told(row, keys, baseline)
    said = ", ".join(f"{key} {value or 'empty'}" for key, value in found[:most])
    return said + (f" and {len(found) - most} more" if len(found) > most else "")


def remarks(row: Row) -> list[str]:
    """Return what a reader should know of a run besides its figures."""
    left = f"steps left behind in {', '.join(row.left[:3])}{', …' if len(row.left) > 3 else ''}" if row.left else ""
    why = f"{row.state}: {row.why}" if row.why else ""
    return [text for text in (why, *row.history, left, *row.problems) if text]


def summary(rows: Sequence[Row]) -> str:
    """Return how many runs there are, by state and by verdict."""
    states = Counter(row.state for row in rows)
    parts = [f"{states[state]:,} {state}" for state in STATES if states[state]]
    bad = sum(row.verdict == "disagreed" for row in rows)
    said = f"{len(rows):,} run{'' if len(rows) == 1 else 's'}: {', '.join(parts)}"
    return said + (f"; checks disagreed in {bad:,}" if bad else "")


def loss_text(value: float | None) -> str:
    """Return a loss with four decimals."""
    return "–" if value is None else number(value) if not math.isfinite(value) or abs(value) >= 1e4 else f"{value:.4f}"
