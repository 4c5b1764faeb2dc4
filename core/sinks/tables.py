"""Tables that a run prints at its start, from plain rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.core.sinks.visible import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# More columns than any table.
_UNBOUNDED = 1000


@dataclass(frozen=True)
class GroupRow:
    """A parameter group.

    lr_factor: its learning rate / the run's. precision: what its products are computed in. recomputed: which parts of
    its layers the backward pass computes again.
    """

    group: str
    parameters: int
    lr_factor: float
    weight_decay: float
    optimizer: str
    precision: str
    recomputed: str


def table(title: str, headers: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Build a table of rows under `headers`; numbers align right. Raises ValueError for a row of another length."""
    from rich.table import Table
    from rich.text import Text

    cells = [list(row) for row in rows]
    # Text, because rich reads markup in a string: a name such as "[red]" would vanish.
    drawn = Table(title=Text(title, "bold") if title else None, title_justify="left", show_header=any(headers))
    for i, header in enumerate(headers):
        numeric = bool(cells) and all(isinstance(row[i], int | float) for row in cells if i < len(row))
        drawn.add_column(Text(header), justify="right" if numeric else "left")
    for row in cells:
        if len(row) != len(headers):
            raise ValueError(f"{len(row)} cells under {len(headers)} headers: {row}")
        drawn.add_row(*(Text(_cell(value)) for value in row))
    return drawn


def stacked(title: str, headers: Sequence[str], rows: Iterable[Sequence[object]], width: int) -> list[str]:
    """Return the lines of a table that is wider than `width`: a row's first cell, below it the others by header.

    A header and its value stand in one line. If they alone are wider than `width`, core/sinks/lines.py breaks the line.
    """
    lines = [title]
    for first, *others in rows:
        named = [f"{header}: {_cell(value)}" for header, value in zip(headers[1:], others, strict=True) if value != ""]
        lines += [f"  {_cell(first)}", *_filled(named, width, "    ")]
    return lines


def print_fitting(console: Console, title: str, headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; on a terminal that is narrower than the table, its rows stand below each other."""
    from lockstep.core.sinks.lines import say

    cells = [list(row) for row in rows]
    drawn = table(title, headers, cells)
    needed = console.measure(drawn, options=console.options.update(width=_UNBOUNDED)).maximum
    if console.is_terminal and needed > console.width:
        for line in stacked(title, headers, cells, console.width):
            say(console, line)
    else:
        console.print(drawn)


def _filled(cells: Sequence[str], width: int, begin: str) -> list[str]:
    """Fill lines with whole cells."""
    lines: list[str] = []
    for cell in cells:
        if lines and len(longer := f"{lines[-1]} · {cell}") <= width:
            lines[-1] = longer
        else:
            lines.append(f"{begin}{cell}")
    return lines


def parameter_groups(rows: Sequence[GroupRow]) -> Table:
    """Tabulate groups: parameters, learning-rate factor, weight decay and precision, with the sum in the last row."""
    drawn = table(
        f"Parameters: {sum(row.parameters for row in rows):,}",
        ("group", "parameters", "optimizer", "lr ×", "decay", "precision", "recomputed"),
        [(r.group, r.parameters, r.optimizer, r.lr_factor, r.weight_decay, r.precision, r.recomputed) for r in rows],
    )
    return drawn


def losses_to_know(vocab_size: int, entropies: Mapping[str, float]) -> Table:
    """Show reference losses of this data: the uniform guess, then each entropy (`unigram`, `bigram`), all in nats."""
    nats = {"uniform guess": math.log(vocab_size), **entropies}
    return table(
        "Losses to compare with",
        ("baseline", "loss (nats)", "perplexity"),
        [(name, round(value, 4), round(math.exp(value), 1)) for name, value in nats.items()],
    )


def where_the_time_went(seconds: Mapping[str, float]) -> Table:
    """Tabulate the seconds of a run by part (core/train/time_accounting.py), the largest first; the sum stands last."""
    total = sum(seconds.values())
    rows = sorted(seconds.items(), key=lambda item: -item[1])
    shown = [(part, f"{spent:.2f}", f"{spent / (total or 1):.1%}") for part, spent in (*rows, ("all", total))]
    return table("Where the time went, until the last record", ("part", "seconds", "share"), shown)


def facts(title: str, values: Mapping[str, object]) -> Table:
    """Return names and values: what is in force, versions, hardware."""
    return table(title, ("", ""), list(values.items()))


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else visible(str(value))
