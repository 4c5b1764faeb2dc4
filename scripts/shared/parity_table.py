"""The table that `lockstep parity` prints: the worst finding of each stage, with bound and basis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lockstep.core.parity.measures.verdict import Check, Finding, never_exercised, overall
from lockstep.core.parity.modes.free_running import Drift
from lockstep.core.parity.reference.stages import is_forward, place
from lockstep.core.sinks.phrases import bounds, fitting_in_words, headline, place_of

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod

FED = {"local": "own input", "end_to_end": "end to end", "over_steps": "over steps"}
# Widths below which there is no room for a column for taps and one for measures, and none for rules between columns.
NARROW, ROOMY = 100, 120


def print_verdict(console: Console, checks: Sequence[Check], recipe: str) -> None:
    """One row a stage, the verdict, the worst finding with its basis, and what was not covered.

    A row says first whether its stage is right; long text is folded where the console is narrow, and never cut.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    by_stage: dict[tuple[str, str, str], list[tuple[Check, Finding]]] = {}
    for check in checks:
        for finding in check.findings:
            by_stage.setdefault((finding.stage, finding.phase, finding.scope), []).append((check, finding))
    table = Table(title=f"The worst of each stage, {recipe}", title_justify="left", title_style="bold")
    if console.width < ROOMY:
        table.box, table.padding = SIMPLE_HEAD, (0, 1, 0, 0)
    folded = ["worst tap", "measured (bound)"]
    if stacked := console.width < NARROW:
        folded = ["worst tap, measured (bound)"]
    for header in ("verdict", "stage", "phase", "fed", "n", *folded):
        justify: JustifyMethod = "right" if header == "n" else "left"
        table.add_column(header, justify=justify, overflow="fold", no_wrap=header not in folded)
    for (stage, phase, scope), found in sorted(by_stage.items(), key=_row):
        check, worst = max(found, key=lambda item: item[1].worst.strain)
        broken = [finding for _, finding in found if not finding.ok]
        measure = worst.worst
        cells = [
            Text(worst.tap),
            Text(f"{measure.name.replace('_', ' ')} {measure.value:.4g} ({bounds(measure.low, measure.high)})"),
        ]
        table.add_row(
            Text(f"{len(broken)} {check.role(worst)}", "bold red") if broken else Text("ok", "green"),
            stage,
            phase,
            FED[scope],
            f"{len(found)}",
            *([Text("\n").join(cells)] if stacked else cells),
        )
    console.print(table)
    verdict = overall(checks)
    console.print(
        f"verdict: {headline(verdict, never_exercised(checks))}",
        style={"agreed": "bold green", "disagreed": "bold red"}.get(verdict, "bold yellow"),
        soft_wrap=True,
    )
    first = next((c for c in checks if c.verdict == "disagreed"), None)
    if first and first.origin:
        o = first.origin
        said = f"first bad step {first.step}; origin: {place_of(o)} {o.note}".rstrip()
        console.print(said, markup=False, soft_wrap=True)
        for other in first.origins[1:4]:
            console.print(f"  wrong by itself as well: {place_of(other)}", markup=False, soft_wrap=True)
        if inherited := sum(first.role(f) == "contaminated" for f in first.findings):
            said = f"  contaminated: {inherited} comparisons that only inherited wrong inputs"
            console.print(said, markup=False, soft_wrap=True)
        if first.fitting:
            console.print(f"declared: {fitting_in_words(first.fitting)}", markup=False, soft_wrap=True)
        if first.cause:
            console.print(f"cause: {first.cause}", markup=False, soft_wrap=True)
        named = o
    elif worst_of := [c.worst for c in checks if c.worst]:
        named = max(worst_of, key=lambda f: f.worst.strain)
        console.print(f"worst: {named.stage} at {named.tap}", markup=False, soft_wrap=True)
    else:
        return
    for measure in named.measures:
        value = f"{measure.name.replace('_', ' ')} {measure.value:.4g} ({bounds(measure.low, measure.high)})"
        console.print(f"  {value}: {measure.basis}", markup=False, soft_wrap=True)
    for item in sorted({item for c in checks for item in c.not_covered}):
        console.print(f"not covered: {item}", markup=False, soft_wrap=True)


def _row(item: tuple[tuple[str, str, str], list[tuple[Check, Finding]]]) -> tuple[int, int, int, str]:
    (stage, phase, scope), found = item
    in_blocks = any(finding.layer is not None for _, finding in found)
    return (*place(stage, phase, 0 if in_blocks and is_forward(stage) else None), scope)


def print_drift(console: Console, drifts: Iterable[Drift]) -> None:
    """One line a step as it comes: losses, and how far the trajectories are apart."""
    console.print(
        "step      loss: candidate   candidate − truth   twin − truth   "
        "weights from truth: candidate   twin   ratio   candidate from twin",
        style="bold",
        soft_wrap=True,
    )
    for d in drifts:
        console.print(
            f"{d.step:4d} {d.loss_candidate:21.6f} {d.loss_candidate - d.loss_truth:19.2e} "
            f"{d.loss_twin - d.loss_truth:14.2e} {d.candidate_from_truth:31.2e} {d.twin_from_truth:6.1e} "
            f"{d.excess:7.3f} {d.candidate_from_twin:21.2e}",
            markup=False,
            soft_wrap=True,
        )
    console.print(
        "nothing was judged: rounding feeds back through the weights, and correct trajectories part as well",
        soft_wrap=True,
    )
