"""The scoreboard of `lockstep faults`: a row for each planted fault, its totals, its file and its lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import UserError
from lockstep.core.sinks.lines import say, tell
from lockstep.scripts.shared.failures import in_one_line

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.core.parity.measures.verdict import Check, Finding

SCHEMA = 1
HONEST = "the honest trainer"
TOP = 3
# Columns of a row in one line.
WIDEST = 114
Origin = tuple[str, str, int | None]


@dataclass(frozen=True)
class Row:
    """A planted fault: the expected finding and the actual one. Layers of `expected` are the model's.

    step: the first check that disagreed. named: its origin. others: all origins in the chain's order.
    rank: place of the expected origin among them, from 1. measure: the origin's worst measure, with its bound.
    loss_moved: relative change of the loss in the first step in which the fault acts. error: why there is no verdict.
    commit: of the checkout that made the row, empty outside one.
    """

    name: str
    recipe: str
    mechanism: str
    number: int | None
    expected: Origin | None
    first_step: int
    within: int
    loss_moves_less_than: float | None
    promised_cause: str | None
    note: str = ""
    step: int | None = None
    named: Origin | None = None
    others: tuple[Origin, ...] = ()
    rank: int | None = None
    measure: str = ""
    loss_moved: float | None = None
    cause: str = ""
    checks: int = 0
    seconds: float = 0.0
    error: str = ""
    commit: str = ""

    @property
    def in_time(self) -> bool:
        """Return whether a check within the expected steps found the fault, and no earlier one disagreed."""
        return self.step is not None and 0 <= self.step - self.first_step < self.within

    @property
    def exact(self) -> bool:
        """Return whether the origin has the stage, phase and layer of the fault."""
        return self.rank == 1

    @property
    def broken_promises(self) -> list[str]:
        """Describe each difference from the expected finding; empty if there is none."""
        if self.error:
            return [f"no verdict: {self.error}"]
        if self.expected is None:
            return ["accused"] if self.step else []
        said = []
        if not self.in_time:
            said.append("missed" if self.step is None else f"found in step {self.step}, acts in {self.first_step}")
        elif not self.exact:
            said.append("misnamed" if self.rank is None else f"its origin is number {self.rank} of those named")
        limit, moved = self.loss_moves_less_than, self.loss_moved
        if limit is not None and moved is not None and not moved < limit:
            said.append(f"the loss moved by {moved:.1e}")
        if self.promised_cause and self.step is not None and self.promised_cause not in self.cause:
            said.append(f"the cause does not name {self.promised_cause!r}")
        return said

    def to_json(self) -> dict[str, Any]:
        """Return a mapping for JSON."""
        return asdict(self) | {"in_time": self.in_time, "exact": self.exact, "broken_promises": self.broken_promises}


def from_json(row: dict[str, Any]) -> Row:
    """Return the row from a mapping made by `to_json`."""
    kept = {key: row[key] for key in Row.__dataclass_fields__}
    for key in ("expected", "named"):
        kept[key] = tuple(kept[key]) if kept[key] else None
    return Row(**kept | {"others": tuple(tuple(o) for o in kept["others"])})


def said_of(check: Check, row: Row) -> Row:
    """Return the row with the origins of a check that disagreed."""
    from lockstep.core.sinks.phrases import bounds

    origins = tuple(_link(finding) for finding in check.origins)
    found = check.origins[0]
    measure = ""
    if found.measures:
        m = found.worst
        measure = f"{m.name.replace('_', ' ')} {m.value:.3g} ({bounds(m.low, m.high)})"
    rank = origins.index(row.expected) + 1 if row.expected in origins else None
    return replace(row, named=origins[0], others=origins[:8], rank=rank, measure=measure)


def _link(finding: Finding) -> Origin:
    return finding.stage, finding.phase, finding.layer


def totals(rows: Sequence[Row]) -> dict[str, Any]:
    """Count the results of the faults' rows; the honest trainer's row is counted separately."""
    faults = [row for row in rows if row.expected is not None]
    return {
        "faults": len(faults),
        "found_in_time": sum(row.in_time for row in faults),
        "found_in_the_first_step": sum(row.step == row.first_step for row in faults),
        "named_exactly": sum(row.in_time and row.exact for row in faults),
        "within_top_three": sum(row.in_time and row.rank is not None and row.rank <= TOP for row in faults),
        "accused_before_they_act": sum(row.step is not None and row.step < row.first_step for row in faults),
        "without_a_verdict": sum(bool(row.error) for row in faults),
        "as_promised": sum(not row.broken_promises for row in faults),
        "honest_trainer_accused": any(row.broken_promises for row in rows if row.expected is None),
        "seconds": sum(row.seconds for row in rows),
    }


def in_words(counts: dict[str, Any]) -> str:
    """Return the totals as a sentence."""
    n = counts["faults"]
    honest = "accused" if counts["honest_trainer_accused"] else "not accused"
    return (
        f"{counts['found_in_time']} of {n} found in time ({counts['found_in_the_first_step']} in the first step in "
        f"which they act), {counts['named_exactly']} named exactly, {counts['within_top_three']} within the top "
        f"three; {counts['accused_before_they_act']} accused before they act, {counts['without_a_verdict']} without a "
        f"verdict; the honest trainer is {honest}"
    )


def place(origin: Origin | None) -> str:
    """Return an origin in words, such as `attn backward 3`."""
    return "nothing" if origin is None else " ".join(str(part) for part in origin if part is not None)


def write(file: Path, rows: Sequence[Row], mark: str) -> None:
    """Write the scoreboard as JSON: rows, and totals by recipe."""
    from lockstep.core.files.atomic import write_atomically

    by_recipe: dict[str, list[Row]] = {}
    for row in rows:
        by_recipe.setdefault(row.recipe, []).append(row)
    tree = {
        "schema": SCHEMA,
        "stamp": mark,
        "totals": {recipe: totals(of_recipe) for recipe, of_recipe in by_recipe.items()},
        "rows": [row.to_json() for row in rows],
    }
    write_atomically(file, [(json.dumps(tree, indent=1, ensure_ascii=False) + "\n").encode()])


def read(file: Path, mark: str) -> list[Row]:
    """Return the rows of an earlier run if its stamp is `mark`, else none. Raises UserError for a damaged file."""
    try:
        tree = json.loads(file.read_text())
        return [from_json(row) for row in tree["rows"]] if tree["stamp"] == mark else []
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a scoreboard: {in_one_line(error)}") from error


def print_head(console: Console) -> None:
    """Print the head of the table of faults; a narrower terminal has none, as its lines name what they hold."""
    if not _is_narrow(console):
        head = f"{'fault':<29} {'planted in':<25} {'found':<8}  {'named':<25} {'rank':<5} {'loss moved':>9}"
        console.print(head, style="bold", soft_wrap=True)


def print_row(console: Console, row: Row) -> None:
    """Print the lines of a judged fault: one, or two on a narrow terminal, and each difference from the expectation."""
    broken = row.broken_promises
    style = "red" if broken else "green"
    if _is_narrow(console):
        for line in _narrow_lines(row):
            say(console, line, style)
    else:
        console.print(_wide_line(row), style=style, markup=False, soft_wrap=True)
    for said in broken:
        tell(console, f"    {said}", "red")
    if row.cause:
        tell(console, f"    cause: {row.cause}")


def _is_narrow(console: Console) -> bool:
    return bool(console.is_terminal) and console.width < WIDEST


def _narrow_lines(row: Row) -> list[str]:
    found = "not found" if row.step is None else f"found in step {row.step}"
    if row.name == HONEST:
        accused = "not accused" if row.step is None else f"accused in step {row.step}, named {place(row.named)}"
        return [f"{row.name}: {accused}, {row.seconds:.0f} s"]
    rank = [f"top {row.rank}"] if row.rank is not None else []
    moved = [f"loss moved by {row.loss_moved:.1e}"] if row.loss_moved is not None else []
    return [
        f"{row.name}: {', '.join([found, *rank, *moved, f'{row.seconds:.0f} s'])}",
        f"    planted in {place(row.expected)}, named {place(row.named)}",
    ]


def _wide_line(row: Row) -> str:
    step = "–" if row.step is None else str(row.step)
    rank = "–" if row.rank is None else str(row.rank)
    moved = "" if row.loss_moved is None else f"{row.loss_moved:.1e}"
    line = f"{row.name:<29} {place(row.expected):<25} step {step:>3}  {place(row.named):<25} top {rank}  {moved:>7}"
    return f"{line}  {row.seconds:4.0f} s"
