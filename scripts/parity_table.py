"""The table that `lockstep parity` prints: the worst finding of each stage, with bound and basis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from core.parity.stages import ORDER
from core.parity.verdict import Check, Finding, overall
from core.sinks.phrases import bounds

if TYPE_CHECKING:
    from rich.console import Console


def print_verdict(console: Console, checks: Sequence[Check], recipe: str) -> None:
    """One row a stage, the verdict, the worst finding with its basis, and what was not covered."""
    from rich.table import Table
    from rich.text import Text

    by_stage: dict[tuple[str, str], list[tuple[Check, Finding]]] = {}
    for check in checks:
        for finding in check.findings:
            by_stage.setdefault((finding.stage, finding.scope), []).append((check, finding))
    table = Table(title=f"The worst of each stage, {recipe}", title_justify="left", title_style="bold")
    for header in ("stage", "fed", "n", "worst tap", "measured (bound)", "basis of the bound", "verdict"):
        table.add_column(header, justify="right" if header == "n" else "left", no_wrap=header != "basis of the bound")
    for (stage, scope), found in sorted(by_stage.items(), key=lambda item: ORDER[item[0][0]]):
        _, worst = max(found, key=lambda item: item[1].worst.strain)
        broken = sum(not f.ok for _, f in found)
        measure = worst.worst
        table.add_row(
            stage,
            "own input" if scope == "local" else "end to end",
            f"{len(found)}",
            Text(worst.tap),
            Text(f"{measure.name.replace('_', ' ')} {measure.value:.4g} ({bounds(measure.low, measure.high)})"),
            Text(measure.basis),
            Text(f"{broken} broken", "bold red") if broken else Text("ok", "green"),
        )
    console.print(table)
    verdict = overall(checks)
    console.print(
        f"verdict: {verdict}", style={"agreed": "bold green", "disagreed": "bold red"}.get(verdict, "bold yellow")
    )
    first = next((c for c in checks if c.verdict == "disagreed"), None)
    if first and first.origin:
        o = first.origin
        console.print(
            f"first bad step {first.step}; origin: {o.stage} at {o.tap} "
            f"({o.phase}, {'from its own input' if o.scope == 'local' else 'end to end'}) {o.note}",
            markup=False,
        )
        named = o
    elif worst_of := [c.worst for c in checks if c.worst]:
        named = max(worst_of, key=lambda f: f.worst.strain)
        console.print(f"worst: {named.stage} at {named.tap}", markup=False)
    else:
        return
    for measure in named.measures:
        value = f"{measure.name.replace('_', ' ')} {measure.value:.4g} ({bounds(measure.low, measure.high)})"
        console.print(f"  {value}: {measure.basis}", markup=False, soft_wrap=True)
    for item in sorted({item for c in checks for item in c.not_covered}):
        console.print(f"not covered: {item}", markup=False, soft_wrap=True)
