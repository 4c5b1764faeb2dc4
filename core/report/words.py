"""The verdict in words, on top of the page: the first bad step and its origin, or what held and how near its bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.core.parity.measures.verdict import Measure
from lockstep.core.report.checks import CONTAMINATED, HELD, VERDICTS, BadStep, Checks, RowKey, Worst
from lockstep.core.report.text import esc, number, plural

BADGES = {
    "agreed": ("good", "✓", "Agreed"),
    "disagreed": ("bad", "✕", "Disagreed"),
    "could_not": ("skip", "?", "Could not tell"),
    "not_checked": ("skip", "-", "Not checked"),
}
DISPLAY = {"could_not": "could not tell"}
SCOPES = {
    "local": "from the candidate's own inputs",
    "end_to_end": "end to end",
    "over_steps": "summed over steps",
}
ALSO = 5  # further origins that are named
ITEMS = 6  # things not covered before the rest is folded


def verdict(checks: Checks) -> str:
    """Return the verdict as a section of the page."""
    tone, mark, label = BADGES[checks.verdict]
    body = _disagreed(checks, checks.first_bad) if checks.first_bad else _held(checks)
    return (
        f'<section class="verdict {tone}" aria-label="Verdict">'
        f'<p class="badge"><span aria-hidden="true">{mark}</span> {label}</p>'
        f'{body}<p class="tally">{_tally(checks)}</p>{_not_covered(checks)}</section>'
    )


def where(key: RowKey | Mapping[str, Any]) -> str:
    """Return a comparison's or an origin's place as HTML: stage, phase, layer, tap."""
    tree = vars(key) if isinstance(key, RowKey) else key
    layer = tree.get("layer")
    parts = [esc(tree.get("phase", "?"))] + ([] if layer is None else [f"layer {esc(layer)}"])
    return f"<b>{esc(tree.get('stage', '?'))}</b> {', '.join(parts)}, at <code>{esc(tree.get('tap', '?'))}</code>"


def measured(measure: Measure) -> str:
    """Return `excess 1.55, bound 0.75 to 1.33`, as HTML."""
    name = esc(measure.name.replace("_", " "))
    return f"{name} <b>{number(measure.value)}</b>, bound {interval(measure.low, measure.high)}"


def interval(low: float | None, high: float | None) -> str:
    """Describe the interval that a value must lie in, in words."""
    if low is not None and high is not None:
        return f"±{number(high)}" if low == -high else f"{number(low)} to {number(high)}"
    if high is not None:
        return f"≤ {number(high)}"
    return f"≥ {number(low)}" if low is not None else "none"


def nearness(strain: float) -> str:
    """Describe how near its bound a value came; a strain of 1 is the bound."""
    if not math.isfinite(strain):
        return "beyond any bound"
    return f"{number(100 * strain, 2)} % of the way to its bound" if strain <= 1 else f"{number(strain, 3)} × its bound"


def _disagreed(checks: Checks, bad: BadStep) -> str:
    scope = f", {SCOPES.get(bad.key.scope, esc(bad.key.scope))}" if bad.key else ""
    origin = f"its origin is {where(bad.origin)}{scope}" if bad.origin else "the check names no origin"
    parts = [f'<p class="say">First at <b>step {bad.step:,}</b>; {origin}.</p>']
    if bad.measures:
        # The measure that broke worst stands first: it is why the verdict is what it is.
        rows = "".join(_measure_row(m) for m in sorted(bad.measures, key=lambda m: -m.strain))
        parts.append(
            '<div class="scroll"><table class="measures"><thead><tr><th scope="col">measured</th>'
            '<th scope="col" class="n">value</th><th scope="col" class="n">bound</th><th scope="col">basis</th></tr>'
            f"</thead><tbody>{rows}</tbody></table></div>"
        )
    if bad.note:
        parts.append(f"<p>Decoded: <b>{esc(bad.note)}</b>.</p>")
    if bad.fitting:
        how = "every comparison agrees under" if bad.fits else "stages are nearer to"
        parts.append(f"<p>Declared otherwise: {how} <b>{esc(bad.fitting)}</b>.</p>")
    if bad.cause:
        parts.append(f"<p>Cause: <b>{esc(bad.cause)}</b>.</p>")
    others = [o for o in bad.origins if bad.origin is None or dict(o) != dict(bad.origin)]
    if others:
        more = f" and {len(others) - ALSO} more" if len(others) > ALSO else ""
        named = "; ".join(where(o) for o in others[:ALSO])
        parts.append(f"<p>Wrong by itself as well: {named}{more}.</p>")
    contaminated, held = bad.roles.get(CONTAMINATED, 0), bad.roles.get(HELD, 0)
    total = sum(bad.roles.values())
    by_themselves = total - contaminated - held
    parts.append(
        f"<p>{plural(total, 'comparison')} there: {by_themselves:,} broke by "
        f"{'itself' if by_themselves == 1 else 'themselves'}, {contaminated:,} "
        f"{'is' if contaminated == 1 else 'are'} contaminated (wrong inputs, inherited), {held:,} held.</p>"
    )
    return "".join(parts)


def _measure_row(measure: Measure) -> str:
    mark, tone, spoken = ("✓", "good", "held") if measure.ok else ("✕", "bad", "broken")
    return (
        f'<tr class="{tone}"><th scope="row"><span class="mark" role="img" aria-label="{spoken}">{mark}</span> '
        f'{esc(measure.name.replace("_", " "))}</th><td class="n"><b>{number(measure.value)}</b></td>'
        f'<td class="n">{interval(measure.low, measure.high)}</td><td class="basis">{esc(measure.basis)}</td></tr>'
    )


def _held(checks: Checks) -> str:
    if checks.verdict == "not_checked":
        return '<p class="say">No step of this run was checked against the reference.</p>'
    if not checks.compared:
        return '<p class="say">Nothing was compared with the reference.</p>'
    scopes = [s for s in (*SCOPES, *checks.compared) if checks.compared.get(s)]
    counted = ", ".join(f"{checks.compared[s]:,} {SCOPES.get(s, esc(s))}" for s in dict.fromkeys(scopes))
    total = sum(checks.compared.values())
    parts = [f'<p class="say">{plural(total, "comparison")} in {plural(len(checks.steps), "check")}: {counted}.</p>']
    worst = sorted(checks.worst.items(), key=lambda item: -item[1].strain)
    parts.append(f'<ul class="nearest">{"".join(_nearest(s, w, not i) for i, (s, w) in enumerate(worst))}</ul>')
    if checks.not_exercised:
        parts.append(f"<p>Not exercised in any check: <b>{esc(', '.join(checks.not_exercised))}</b>.</p>")
    return "".join(parts)


def _nearest(scope: str, worst: Worst, first: bool) -> str:
    if worst.measure is None:
        return ""
    scope_words = SCOPES.get(scope, esc(scope))
    start = f"Nearest to its bound {scope_words}" if first else scope_words[0].upper() + scope_words[1:]
    return (
        f"<li>{start}: {where(worst.key)}, step {worst.step:,}: {measured(worst.measure)}, "
        f"{nearness(worst.strain)} <small>{esc(worst.measure.basis)}</small></li>"
    )


def _tally(checks: Checks) -> str:
    if not checks.lines:
        return ""
    shares = [f"{checks.counts[v]:,} {DISPLAY.get(v, v)}" for v in VERDICTS if checks.counts[v]]
    shares += [f"besides {checks.damaged:,} damaged, whose verdicts are not known"] if checks.damaged else []
    return f"{plural(len(checks.lines), 'check')}: {', '.join(shares)}."


def _not_covered(checks: Checks) -> str:
    """List what the verdict does not cover: comparisons that were not made, and checks that were skipped."""
    if not checks.lines:
        return ""
    items = [f"{what} ({plural(n, 'check')})" for what, n in checks.not_covered.items()]
    items += [f"skipped: {reason} ({plural(n, 'check')})" for reason, n in checks.reasons.items()]
    if not items:
        return '<p class="uncovered">Not covered: nothing was left out.</p>'
    rest = items[ITEMS:]
    fold = f"<details><summary>and {len(rest)} more</summary>{_list(rest)}</details>" if rest else ""
    return f'<div class="uncovered"><p>Not covered:</p>{_list(items[:ITEMS])}{fold}</div>'


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{esc(item)}</li>' for item in items)}</ul>"
