"""The results of mutants as a page: score, heatmap, the smallest size found at each place, survivors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.core.mutate.conditions import ALWAYS, CONDITIONS
from lockstep.core.mutate.operators import OPERATORS
from lockstep.core.mutate.places import KINDS, Origin
from lockstep.core.mutate.rows import SMALL, Row, Score


def page(rows: Sequence[Row], about: Sequence[str], line: Callable[[Row], str]) -> str:
    """Return the page of rows of any recipes. about: paragraphs on how they were made. line: runs a row's mutant."""
    parts = ["# Mutants of the training step", *about]
    for recipe in dict.fromkeys(row.recipe for row in rows):
        of = [row for row in rows if row.recipe == recipe]
        parts += [f"## {recipe}", "\n".join(f"* {text.strip()}" for text in Score.of(of).lines())]
        parts += ["### Found, of those that move the step by more than 0.1 %", heatmap(of)]
        parts += ["### Smallest wrong length found, and largest not found", sizes(of)]
        parts += ["### Survivors that move the step by more than 1 %", survivors(of, line)]
        parts += ["### Found, and not named exactly", misnamed(of)]
    return "\n\n".join(parts) + "\n"


def heatmap(rows: Sequence[Row]) -> str:
    """Return a table of kind and operator by condition: mutants found / mutants that move the step by over SMALL."""
    moving = [row for row in rows if row.acts and not row.effect <= SMALL]
    conditions = [one for one in CONDITIONS if any(row.mutant.condition == one for row in moving)]
    lines = ["| place | operator | " + " | ".join(conditions) + " |", "|---|---|" + "--:|" * len(conditions)]
    for kind in KINDS:
        for operator in OPERATORS:
            of = [row for row in moving if (row.mutant.kind, row.mutant.operator.name) == (kind, operator)]
            cells = [[row for row in of if row.mutant.condition == one] for one in conditions]
            if of:
                lines.append(f"| {kind} | {operator} | " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines)


def _cell(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    found = sum(row.found for row in rows)
    return f"{found}/{len(rows)}" if found == len(rows) else f"**{found}/{len(rows)}**"


def sizes(rows: Sequence[Row]) -> str:
    """Return a table of places: the smallest |1 − factor| of `scale` that was found, the largest that was not."""
    found: dict[str, list[tuple[float, bool]]] = {}
    for row in rows:
        one = row.mutant
        if one.operator.name == "scale" and one.condition == ALWAYS and row.acts:
            found.setdefault(f"{one.place}:{one.kind}", []).append((one.operator.size, row.found))
    lines = ["| place | smallest found | largest not found |", "|---|--:|--:|"]
    for place, tried in sorted(found.items()):
        least = min((size for size, is_found in tried if is_found), default=None)
        most = max((size for size, is_found in tried if not is_found), default=None)
        lines.append(f"| `{place}` | {_size(least)} | {_size(most)} |")
    return "\n".join(lines)


def _size(size: float | None) -> str:
    return "–" if size is None else f"{size:.2g}"


def survivors(rows: Sequence[Row], line: Callable[[Row], str]) -> str:
    """Return for each survivor the command that runs it and its effect, the largest first."""
    of = sorted((row for row in rows if row.survives), key=lambda row: -row.effect)
    text = [f"{line(row)}   # gradients {row.gradients:.1e}, update {row.update:.1e}" for row in of]
    return "\n".join(["```", *text, "```"]) if text else "None."


def misnamed(rows: Sequence[Row]) -> str:
    """Return a table of mutants that move the step by over 1 % and were found under another name."""
    of = [row for row in rows if row.large and row.found and not row.exact]
    lines = ["| mutant | should be named | was named | by |", "|---|---|---|---|"]
    lines += [f"| `{row.id}` | {place(row.expected[0])} | {place(row.named)} | {row.scope} |" for row in of]
    return "\n".join(lines) if of else "None."


def place(origin: Origin | None) -> str:
    """Return an origin in words."""
    if origin is None:
        return "–"
    stage, phase, layer = origin
    return f"{stage} {phase}" + ("" if layer is None else f" {layer}")
