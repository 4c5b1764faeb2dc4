"""The table that `lockstep parity` prints: the worst finding of each stage, with bound and basis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lockstep.core.parity.measures.verdict import Check, Finding, never_exercised, overall
from lockstep.core.parity.modes.free_running import Drift
from lockstep.core.parity.reference.stages import is_forward, place
from lockstep.core.sinks.phrases import bounds, fitting_in_words, headline, place_of

if TYPE_CHECKING:
    from rich.console import Console

FED = {"local": "own input", "end_to_end": "end to end", "over_steps": "over steps"}


def print_verdict(console: Console, checks: Sequence[Check], recipe: str) -> None:
    """One row a stage, the verdict, the worst finding with its basis, and what was not covered."""
    from rich.table import Table
    from rich.text import Text

    by_stage: dict[tuple[str, str, str], list[tuple[Check, Finding]]] = {}
    for check in checks:
        for finding in check.findings:
            by_stage.setdefault((finding.stage, finding.phase, finding.scope), []).append((check, finding))
    table = Table(title=f"The worst of each stage, {recipe}", title_justify="left", title_style="bold")
    for header in ("stage", "phase", "fed", "n", "worst tap", "measured (bound)", "verdict"):
        table.add_column(header, justify="right" if header == "n" else "left", no_wrap=True)
    for (stage, phase, scope), found in sorted(by_stage.items(), key=_row):
        check, worst = max(found, key=lambda item: item[1].worst.strain)
        broken = [finding for _, finding in found if not finding.ok]
        measure = worst.worst
        table.add_row(
            stage,
            phase,
            FED[scope],
            f"{len(found)}",
            Text(worst.tap),
            Text(f"{measure.name.replace('_', ' ')} {measure.value:.4g} ({bounds(measure.low, measure.high)})"),
            Text(f"{len(broken)} {check.role(worst)}", "bold red") if broken else Text("ok", "green"),
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
        console.print(f"first bad step {first.step}; origin: {place_of(o)} {o.note}", markup=False)
        for other in first.origins[1:4]:
            console.print(f"  wrong by itself as well: {place_of(other)}", markup=False)
        if inherited := sum(first.role(f) == "contaminated" for f in first.findings):
            console.print(f"  contaminated: {inherited} comparisons that only inherited wrong inputs", markup=False)
        if first.fitting:
            console.print(f"declared: {fitting_in_words(first.fitting)}", markup=False, soft_wrap=True)
        if first.cause:
            console.print(f"cause: {first.cause}", markup=False, soft_wrap=True)
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
    )
    for d in drifts:
        console.print(
            f"{d.step:4d} {d.loss_candidate:21.6f} {d.loss_candidate - d.loss_truth:19.2e} "
            f"{d.loss_twin - d.loss_truth:14.2e} {d.candidate_from_truth:31.2e} {d.twin_from_truth:6.1e} "
            f"{d.excess:7.3f} {d.candidate_from_twin:21.2e}",
            markup=False,
        )
    console.print("nothing was judged: rounding feeds back through the weights, and correct trajectories part as well")
