"""Print the verdict of checks: disagreements, each stage's share of its bound, and a table of all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lockstep.core.parity.measures.verdict import Check, Finding, Measure, never_exercised, overall
from lockstep.core.parity.modes.free_running import Drift
from lockstep.core.parity.reference.stages import is_forward, place
from lockstep.core.report.text import plural
from lockstep.core.sinks.lines import bar, say
from lockstep.core.sinks.phrases import bounds, fitting_in_words, headline, place_of

if TYPE_CHECKING:
    from rich.console import Console

FED = {"local": "own input", "end_to_end": "end to end", "over_steps": "over steps"}
# A width beyond that of any table.
_WIDE = 10_000
# Broken measures of the origin that are shown without --verbose.
SHOWN = 3
# Columns of a bar.
SHORTEST, LONGEST = 6, 24


def print_verdict(console: Console, checks: Sequence[Check], recipe: str, verbose: bool = False) -> None:
    """Print the results, most important first: verdict, disagreements, then each stage's share of its bound.

    verbose: also every measure of the finding that is named, and the table with a row for each stage, phase and scope.
    On a narrow console, lines break between words; nothing is cut.
    """
    verdict = overall(checks)
    said = f"verdict: {headline(verdict, never_exercised(checks))}"
    say(console, said, {"agreed": "bold green", "disagreed": "bold red"}.get(verdict, "bold yellow"))
    first = next((c for c in checks if c.verdict == "disagreed"), None)
    if first and first.origin:
        say(console, f"first bad step {first.step}; origin: {place_of(first.origin)} {first.origin.note}".rstrip())
        _print_measures(console, first.origin, verbose)
        for other in first.origins[1:4]:
            say(console, f"  also wrong by itself: {place_of(other)}")
        if more := len(first.origins[4:]):
            say(console, f"  and {more} more that are wrong by themselves")
        if inherited := sum(first.role(f) == "contaminated" for f in first.findings):
            say(console, f"  contaminated: {plural(inherited, 'comparison')} that only inherited wrong inputs")
        if first.fitting:
            say(console, f"declared: {fitting_in_words(first.fitting)}")
        if first.cause:
            say(console, f"cause: {first.cause}")
    elif worst_of := [c.worst for c in checks if c.worst and c.worst.measures]:
        named = max(worst_of, key=lambda f: f.worst.strain)
        say(console, f"worst: {named.stage} at {named.tap}")
        _print_measures(console, named, verbose)
    if any(check.findings for check in checks):
        print_strain(console, checks, recipe)
    if verbose:
        print_table(console, checks, recipe)
    for item in sorted({item for c in checks for item in c.not_covered}):
        say(console, f"not covered: {item}")
    if not verbose and any(check.findings for check in checks):
        say(console, "every comparison: --verbose, and --json FILE")


def _print_measures(console: Console, named: Finding, verbose: bool) -> None:
    """Print a finding's measures with bounds and their basis: those that exceed a bound, or the one nearest to it."""
    ranked = sorted(named.measures, key=lambda measure: -measure.strain)
    broken = [measure for measure in ranked if not measure.ok]
    for measure in named.measures if verbose else broken[:SHOWN] or ranked[:1]:
        say(console, f"  {_measured(measure)}: {measure.basis}")
    if not verbose and len(broken) > SHOWN:
        say(console, f"  {len(broken) - SHOWN} more of its measures are beyond their bounds")


def _measured(measure: Measure) -> str:
    return f"{measure.name.replace('_', ' ')} {measure.value:.4g} ({bounds(measure.low, measure.high)})"


def print_table(console: Console, checks: Sequence[Check], recipe: str) -> None:
    """Print a row for each stage, phase and scope: its mark, and its worst measure with tap and bound.

    A console too narrow for whole cells gets two lines per row instead of a table.
    """
    from rich.table import Table
    from rich.text import Text

    by_stage: dict[tuple[str, str, str], list[tuple[Check, Finding]]] = {}
    for check in checks:
        for finding in check.findings:
            by_stage.setdefault((finding.stage, finding.phase, finding.scope), []).append((check, finding))
    title = f"The worst of each stage, {recipe}"
    table = Table(title=title, title_justify="left", title_style="bold")
    for header in ("verdict", "stage", "phase", "fed", "n", "worst tap", "measured (bound)"):
        table.add_column(header, justify="right" if header == "n" else "left", no_wrap=True)
    rows: list[tuple[Text, list[str]]] = []
    for (stage, phase, scope), found in sorted(by_stage.items(), key=_row):
        check, worst = max(found, key=lambda item: _strain(item[1]))
        broken = [finding for _, finding in found if not finding.ok]
        measured = _measured(worst.worst) if worst.measures else "nothing was compared"
        mark = Text(f"{len(broken)} {check.role(worst)}", "bold red") if broken else Text("ok", "green")
        rows.append((mark, [stage, phase, FED[scope], f"{len(found)}", worst.tap, measured]))
        table.add_row(mark, *map(Text, rows[-1][1]))
    if console.measure(table, options=console.options.update(width=_WIDE)).maximum <= console.width:
        console.print(table)
        return
    say(console, title, "bold")
    for mark, (stage, phase, fed, count, tap, measured) in rows:
        console.print(mark, f" {stage}", f" {phase}", f" {fed}", f" {count}", soft_wrap=True)
        say(console, f"    {tap}: {measured}")


def print_strain(console: Console, checks: Sequence[Check], recipe: str) -> None:
    """Print a line for each stage, in the order of the chain, with a bar: its worst measure as a share of its bound.

    A stage that is wrong by itself shows its own error, even if an inherited error is larger.
    """
    by_stage: dict[str, list[tuple[Check, Finding]]] = {}
    for check in checks:
        for finding in check.findings:
            by_stage.setdefault(finding.stage, []).append((check, finding))
    ordered = sorted(by_stage.items(), key=lambda item: min(map(_place, item[1])))
    worst = [(stage, *max(found, key=_weight)) for stage, found in ordered]
    shares = {stage: _share(_strain(finding)) for stage, _, finding in worst}
    names, numbers = max(map(len, shares)), max(map(len, shares.values()))
    tails = max(len(_tails(check, finding)[0]) for _, check, finding in worst)
    width = max(SHORTEST, min(LONGEST, console.width - names - numbers - tails - 6))
    say(console, f"strain of each stage: its worst measure as a share of its bound, {recipe}", "bold")
    for stage, check, finding in worst:
        drawn = f"{bar(_strain(finding), width, console.options.ascii_only)} {shares[stage]:>{numbers}}"
        line = f"  {stage:<{names}} {drawn}"
        if len(line) > console.width:
            line = f"  {stage}\n    {drawn}"
        room = console.width - len(line.rpartition("\n")[2])
        line += next((f"  {tail}" for tail in _tails(check, finding) if len(tail) + 2 <= room), "")
        console.print(line, style=None if finding.ok else "bold red", markup=False, highlight=False, soft_wrap=True)


def _weight(item: tuple[Check, Finding]) -> tuple[bool, float]:
    """Order the findings of a stage: those wrong by themselves come first."""
    check, finding = item
    return check.role(finding) == "origin", _strain(finding)


def _strain(finding: Finding) -> float:
    return finding.worst.strain if finding.measures else math.inf


def _share(strain: float) -> str:
    """Format a strain: `57 %` of its bound, or `×690` beyond it."""
    if math.isinf(strain):
        return "broken"
    return f"{strain:.0%}".replace("%", " %") if strain <= 1 else f"×{strain:.3g}"


def _tails(check: Check, finding: Finding) -> tuple[str, ...]:
    """Return the words beside a bar, the longest first."""
    measure = finding.worst.name.replace("_", " ") if finding.measures else "nothing was compared"
    mark = {None: "", "origin": "wrong: ", "contaminated": "inherited: "}[check.role(finding)]
    return f"{mark}{finding.phase}, {measure}", f"{mark}{finding.phase}", mark.removesuffix(": ") or finding.phase


def _place(item: tuple[Check, Finding]) -> tuple[int, int, int]:
    _, finding = item
    return place(finding.stage, finding.phase, 0 if finding.layer is not None and is_forward(finding.stage) else None)


def _row(item: tuple[tuple[str, str, str], list[tuple[Check, Finding]]]) -> tuple[int, int, int, str]:
    (stage, phase, scope), found = item
    in_blocks = any(finding.layer is not None for _, finding in found)
    return (*place(stage, phase, 0 if in_blocks and is_forward(stage) else None), scope)


def print_drift(console: Console, drifts: Iterable[Drift]) -> None:
    """Print one line per step: losses and distances between the trajectories."""
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
        "nothing was judged: rounding feeds back through the weights, so even correct trajectories drift apart",
        soft_wrap=True,
    )
