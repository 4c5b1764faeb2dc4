"""Draw the results of mutants as SVG: a panel for each condition, with places against operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from lockstep.core.mutate.conditions import CONDITIONS
from lockstep.core.mutate.operators import OPERATORS
from lockstep.core.mutate.places import KINDS
from lockstep.core.mutate.rows import Row


@dataclass(frozen=True)
class Outcome:
    """A class of rows. colour: in the picture; distinct in grey and for those who see no red or no green."""

    words: str
    colour: str
    holds: Callable[[Row], bool]


# Each row has one. In the order in which they share a cell.
OUTCOMES = (
    Outcome("found and named", "#2b7bba", lambda row: row.acts and row.found and row.exact),
    Outcome("found, misnamed", "#f2a93b", lambda row: row.acts and row.found and not row.exact),
    Outcome("missed, moves up to 1 %", "#e8998d", lambda row: row.acts and not row.found and not row.large),
    Outcome("missed, moves more", "#a50f15", lambda row: row.survives),
    Outcome("moved no bit", "#c9ced3", lambda row: row.equivalent and not row.error),
    Outcome("ended the trainer", "#5b6470", lambda row: row.stopped and not row.error),
    Outcome("no verdict", "#111111", lambda row: bool(row.error)),
)
CELL, GAP, PANELS = 17, 18, 4
# Room for labels, in pixels: kinds to the left, operators below a panel, a condition above it, title and legend.
LEFT, BELOW, ABOVE, HEAD = 74, 66, 22, 78
FONT = "font-family='Helvetica, Arial, sans-serif'"


def picture(rows: Sequence[Row]) -> str:
    """Return the picture of rows of any recipes; a cell with several mutants is divided by their outcomes."""
    kinds = [kind for kind in KINDS if any(row.mutant.kind == kind for row in rows)]
    operators = [name for name in OPERATORS if any(row.mutant.operator.name == name for row in rows)]
    conditions = [one for one in CONDITIONS if any(row.mutant.condition == one for row in rows)]
    across, down = min(PANELS, max(len(conditions), 1)), -(-len(conditions) // PANELS)
    wide, high = CELL * len(operators), CELL * len(kinds)
    width = max(LEFT + across * (wide + GAP), 720)
    height = HEAD + down * (ABOVE + high + BELOW)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='0 0 {width} {height}' {FONT} font-size='11' fill='#222'>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        *_head(rows),
    ]
    for number, condition in enumerate(conditions):
        x = LEFT + number % PANELS * (wide + GAP)
        y = HEAD + number // PANELS * (ABOVE + high + BELOW) + ABOVE
        parts.append(f"<text x='{x}' y='{y - 7}' font-weight='bold'>{condition}</text>")
        if number % PANELS == 0:
            parts += [_label(x - 6, y + i * CELL + 12, kind) for i, kind in enumerate(kinds)]
        parts += [_label(x + i * CELL + 12, y + high + 6, name, turned=True) for i, name in enumerate(operators)]
        of_panel = [row for row in rows if row.mutant.condition == condition]
        parts += _panel(of_panel, kinds, operators, x, y)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _head(rows: Sequence[Row]) -> Iterator[str]:
    recipes = Counter(row.recipe for row in rows)
    said = ", ".join(f"{recipe} {count:,}" for recipe, count in recipes.items())
    yield f"<text x='12' y='22' font-size='14' font-weight='bold'>{len(rows):,} mutants: {escape(said)}</text>"
    for number, outcome in enumerate(OUTCOMES):
        x, y = 12 + number % 4 * 230, 34 + number // 4 * 18
        count = sum(map(outcome.holds, rows))
        yield f"<rect x='{x}' y='{y}' width='12' height='12' fill='{outcome.colour}'/>"
        yield f"<text x='{x + 17}' y='{y + 10}'>{outcome.words}: {count:,}</text>"


def _label(x: int, y: int, text: str, turned: bool = False) -> str:
    turn = f" transform='rotate(-90 {x} {y})'" if turned else ""
    return f"<text x='{x}' y='{y}' text-anchor='end'{turn}>{escape(text)}</text>"


def _panel(rows: Sequence[Row], kinds: Sequence[str], operators: Sequence[str], x: int, y: int) -> Iterator[str]:
    wide, high = CELL * len(operators) - 2, CELL * len(kinds) - 2
    yield f"<rect x='{x}' y='{y}' width='{wide}' height='{high}' fill='#f4f5f6'/>"
    for down, kind in enumerate(kinds):
        for across, operator in enumerate(operators):
            of = [row for row in rows if (row.mutant.kind, row.mutant.operator.name) == (kind, operator)]
            yield from _cell(of, x + across * CELL, y + down * CELL)


def _cell(rows: Sequence[Row], x: int, y: int) -> Iterator[str]:
    if not rows:
        return
    size = CELL - 2
    counts = [(outcome, sum(map(outcome.holds, rows))) for outcome in OUTCOMES]
    one = rows[0].mutant
    said = "; ".join(f"{count} {outcome.words}" for outcome, count in counts if count)
    yield f"<g><title>{one.kind}, {one.operator.name}, {one.condition}: {escape(said)}</title>"
    at = float(x)
    for outcome, count in counts:
        part = size * count / len(rows)
        if count:
            yield f"<rect x='{at:.2f}' y='{y}' width='{part:.2f}' height='{size}' fill='{outcome.colour}'/>"
        at += part
    yield "</g>"
