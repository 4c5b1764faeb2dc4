"""Rows as a table of the terminal: figures in columns, differences in a column or, where there is no room, below."""

from __future__ import annotations

import math
import re
import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lockstep.core.errors import printable
from lockstep.core.overview.differences import told
from lockstep.core.overview.row import FAILED, KILLED, RUNNING, STATES, UNKNOWN, Row
from lockstep.core.report.text import count, number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# From this many columns on the differences are a column of the table.
WIDE = 130
# Differences that are named of one run.
NAMED = 6
# Columns between two columns, of the narrowest column of paths, and of a line below the table.
_GAP, _NARROWEST, _LONGEST_LINE = 2, 8, 200
_RIGHT = ("steps", "loss", "val", "tok/s")
_STYLES = {RUNNING: "cyan", FAILED: "red", KILLED: "red", UNKNOWN: "yellow"}
HEADERS = ("run", "state", "steps", "loss", "val", "tok/s", "checks", "ago")


def print_rows(console: Console, rows: Sequence[Row], keys: Sequence[str], baseline: Row | None) -> None:
    """Print the table, then what there is no column for: differences, ends, history and problems of runs."""
    wide = console.width >= WIDE
    now = time.time()
    lines = [[printable(cell) for cell in cells_of(row, now)] for row in rows]
    headers = list(HEADERS)
    if wide and keys:
        headers.append("differs in")
        for line, row in zip(lines, rows, strict=True):
            line.append(printable(differences_of(row, keys, baseline)))
    styles = [(_STYLES.get(row.state, ""), "bold red" if row.checks["disagreed"] else "") for row in rows]
    console.print(_drawn(headers, lines, styles, console.width), soft_wrap=True)
    console.print(summary(rows), style="dim")
    below: list[tuple[str, str]] = []
    for row in rows:
        said = [] if wide else [differences_of(row, keys, baseline)]
        below += [(row.path, line) for line in (*said, *remarks(row)) if line]
    width = max(min(console.width, _LONGEST_LINE) - 1, 20)
    told = [textwrap.fill(printable(f"{path}: {line}"), width, subsequent_indent="  ") for path, line in below]
    if told:
        console.print("\n" + "\n".join(told), soft_wrap=True)


def _drawn(
    headers: Sequence[str], lines: Sequence[Sequence[str]], styles: Sequence[tuple[str, str]], width: int
) -> Text:
    """Format columns under `headers` as one text, in place of rich's slow table; fold paths where room is short."""
    from rich.cells import cell_len
    from rich.text import Text

    widths = [max(map(cell_len, column)) for column in zip(headers, *lines, strict=True)]
    widths[0] = max(min(widths[0], width - sum(widths[1:]) - _GAP * (len(widths) - 1)), _NARROWEST)
    parts: list[tuple[str, str]] = []

    def put(cells: Sequence[str], style: str, looks: Mapping[int, str]) -> None:
        first, *more = _folded(cells[0], widths[0]) or [""]
        line = []
        for place, cell in enumerate((first, *cells[1:])):
            space = " " * (widths[place] - cell_len(cell))
            text = space + cell if headers[place] in _RIGHT else cell + space
            line.append(((" " * _GAP if place else "") + text, looks.get(place) or style))
        while line and not line[-1][0].strip():
            line.pop()
        if line:
            text, look = line.pop()
            line.append((text.rstrip(), look))
        parts.extend((*line, ("".join(f"\n{rest}" for rest in more) + "\n", style)))

    put(headers, "bold", {})
    for cells, (state, checks) in zip(lines, styles, strict=True):
        put(cells, "", {HEADERS.index("state"): state, HEADERS.index("checks"): checks})
    # The last line's own end is the console's to print. A text that grows piece by piece is slow: rich copies it.
    return Text.assemble(*parts[:-1], parts[-1][0].removesuffix("\n"))


def _folded(path: str, width: int) -> list[str]:
    """Fold a path behind its slashes, and within a name only where that is wider than `width` columns."""
    from rich.cells import cell_len, chop_cells

    lines: list[str] = []
    for part in re.findall(r"[^/]*/|[^/]+", path):
        if lines and cell_len(lines[-1] + part) <= width:
            lines[-1] += part
        else:
            lines += chop_cells(part, width)
    return lines


def cells_of(row: Row, now: float) -> list[str]:
    """Return the cells of a row under `HEADERS`. now: seconds since 1970."""
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
    """Return the notes on a run beside its figures."""
    left = f"steps left behind in {', '.join(row.left[:3])}{', …' if len(row.left) > 3 else ''}" if row.left else ""
    why = f"{row.state}: {row.why}" if row.why else ""
    return [text for text in (why, *row.history, left, *row.problems) if text]


def summary(rows: Sequence[Row]) -> str:
    """Return how many runs there are, by state and by verdict."""
    states = Counter(row.state for row in rows)
    parts = [f"{states[state]:,} {state}" for state in STATES if states[state]]
    bad = sum(row.verdict == "disagreed" for row in rows)
    said = f"{len(rows):,} run{'' if len(rows) == 1 else 's'}: {', '.join(parts)}"
    said += f"; checks disagreed in {bad:,}" if bad else ""
    return said + ("; ?: checks that could not tell, or were skipped" if any(map(_without_verdict, rows)) else "")


def _without_verdict(row: Row) -> bool:
    return verdicts(row.checks).endswith("?")


def loss_text(value: float | None) -> str:
    """Return a loss with four decimals."""
    return "–" if value is None else number(value) if not math.isfinite(value) or abs(value) >= 1e4 else f"{value:.4f}"
