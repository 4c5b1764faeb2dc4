"""The page of a sweep: one HTML file that needs nothing but a browser, and in which every name and reason is text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.files.atomic import write_atomically
from lockstep.core.report.build import page
from lockstep.core.report.text import esc, number, plural
from lockstep.core.sweep import charts
from lockstep.core.sweep.fit import Optimum, by_width
from lockstep.core.sweep.outcome import COMPLETE, FAILED, MARKED, PRUNED
from lockstep.core.sweep.results import optimum_of, write_results
from lockstep.core.sweep.space import LEARNING_RATE, Varied
from lockstep.core.sweep.sweep import ranking
from lockstep.core.sweep.widths import INVERSE

if TYPE_CHECKING:
    from lockstep.core.sweep.plan import Arm
    from lockstep.core.sweep.sweep import Sweep, Trial

PAGE = "sweep.html"
_GRID = "display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,520px),1fr));gap:20px 32px"
_FIT = (
    '<p class="hint">The fit is a parabola in ln lr near the best trial, the other settings added to it; the band is '
    "the 95 % interval of its minimum (Fieller).</p>"
)
# Words of a state, and the class of its row.
_STATES = {COMPLETE: "", PRUNED: "pruned", FAILED: "failed", MARKED: "parity disagreed"}


def write_page(sweep: Sweep) -> Path:
    """Write the page into the sweep's folder, and results.json beside it, each whole or not at all; return where."""
    write_results(sweep)
    path = sweep.folder / PAGE
    write_atomically(path, [build_page(sweep).encode("utf-8")])
    return path


def build_page(sweep: Sweep) -> str:
    """Return the page of a sweep as it stands."""
    name = sweep.plan.config.name
    optima = {arm.study: optimum_of(sweep, arm) for arm in sweep.plan.arms}
    body = "\n".join(
        [
            f'<header class="head"><p class="eyebrow">Lockstep sweep</p><h1>{esc(name)}</h1></header>',
            _verdict(sweep),
            _facts(sweep),
            _section("charts", "The trials in charts", "Point at a mark or a line to read it.", _charts(sweep, optima)),
            _widths(sweep, optima),
            _table(sweep),
            _given_up(sweep),
            _commands(sweep),
        ]
    )
    return page(f"{name} · Lockstep sweep", body, {}, ())


def _verdict(sweep: Sweep) -> str:
    best = {arm.study: ranking(sweep.of(arm))[:1] for arm in sweep.plan.arms}
    marked = sum(trial.outcome.state == MARKED for trial in sweep.trials)
    checked = any(trial.outcome.due for trial in sweep.trials)
    found = [trial for trials in best.values() for trial in trials]
    lines = [f'<p class="say">{esc(charts.said(trial))}</p>' for trial in found]
    if marked:
        lines.append(f"<p>{plural(marked, 'trial')} marked: a parity check disagreed; a marked trial never wins.</p>")
    elif not checked:
        lines.append(f"<p>Not checked by parity: {_unchecked(sweep)}.</p>")
    badge = "Best trial" if len(found) == 1 else "Best trial of each width" if found else "No trial can win yet"
    kind = "good" if found else "skip"
    return f'<div class="verdict {kind}"><p class="badge">{badge}</p>{"".join(lines)}</div>'


def _unchecked(sweep: Sweep) -> str:
    every, varied = sweep.plan.config.parity.every, {one.key for one in sweep.plan.sampling.varied}
    if every or "parity.every" in varied:
        return "no trial has reached a step that is due for a check"
    return "parity.every is 0 in these trials"


def _facts(sweep: Sweep) -> str:
    states = Counter(trial.outcome.state for trial in sweep.trials)
    due = sum(trial.outcome.due for trial in sweep.trials)
    agreed = sum(trial.outcome.agreed for trial in sweep.trials)
    bad = sum(len(trial.outcome.disagreed) for trial in sweep.trials)
    planned = sweep.plan.sampling.trials * len(sweep.plan.arms)
    tiles = [
        ("Trials", f"{len(sweep.trials)}", f"of {planned} planned"),
        ("Complete", f"{states[COMPLETE]}", "with an objective"),
        ("Pruned", f"{states[PRUNED]}", sweep.plan.pruner),
        ("Failed", f"{states[FAILED]}", "kept, and shown below"),
        ("Marked", f"{states[MARKED]}", "a check disagreed"),
        ("Parity checks", f"{agreed + bad}", f"of {due} due; {agreed} agreed, {bad} disagreed" if due else "none due"),
    ]
    boxes = "".join(
        f'<div class="tile"><dt>{esc(label)}</dt><dd>{esc(value)}<small>{esc(beside)}</small></dd></div>'
        for label, value, beside in tiles
    )
    plan = sweep.plan
    about = [
        ("Varied", "  ".join(one.text for one in plan.sampling.varied)),
        ("Sampler", f"{plan.sampling.sampler}, seed {plan.sampling.seed}"),
        ("Rounds", f"of {plan.per_round} trials" if plan.in_rounds else "one"),
        ("Objective", objective(sweep)),
        ("Trained by", plan.backend or "torch"),
    ]
    items = "".join(f"<div><dt>{esc(k)}</dt><dd>{esc(v)}</dd></div>" for k, v in about)
    return f'<dl class="tiles">{boxes}</dl>\n<dl class="about">{items}</dl>'


def objective(sweep: Sweep) -> str:
    """Return in words what trials are ranked by."""
    # Where it is varied, it is above 0 in each trial.
    if sweep.plan.config.eval.every or any(one.key == "eval.every" for one in sweep.plan.sampling.varied):
        return "validation loss after the last step"
    return "mean training loss of the last tenth of the steps (eval.every is 0)"


def optimum_in_words(found: Optimum | None) -> str:
    """Return the optimal learning rate in a sentence or two."""
    if found is None:
        return "No trial has ended that may count."
    if found.rate is None:
        lines = [f"No fitted optimum: {found.why}. The best trial has {number(found.best, 4)}."]
    else:
        interval = (
            f"95 % interval {number(found.low, 3)} … {number(found.high, 3)}"
            if found.low is not None and found.high is not None
            else "its 95 % interval has no bounds"
        )
        lines = [f"Fitted optimum {number(found.rate, 3)}, {interval}, from {found.used} of {found.of} trials."]
    if found.edge:
        end = {"low": "lowest", "high": "highest"}[found.edge]
        lines.append(f"It lies at the edge, the {end} rate that was tried: widen the range there.")
    return " ".join(lines)


def _charts(sweep: Sweep, optima: dict[str, Optimum | None]) -> list[str]:
    figures = []
    for arm in sweep.plan.arms:
        at = "" if arm.width is None else f", width {arm.width}"
        figures += [*_rates(sweep, arm, optima[arm.study], at), _curves(sweep, arm, at), _parallel(sweep, arm, at)]
    if LEARNING_RATE not in {one.key for one in sweep.plan.sampling.varied}:
        figures.append('<p class="hint">The learning rate was not varied: no optimum is fitted.</p>')
    return figures


def _rates(sweep: Sweep, arm: Arm, optimum: Optimum | None, at: str) -> list[str]:
    varied = sweep.plan.sampling.varied
    by = next((one for one in varied if not one.is_range and one.key != LEARNING_RATE and len(one.choices) > 1), None)
    figures = []
    for one in varied:
        if not one.numbers or (not one.is_range and len(one.choices) < 3):
            continue
        found = optimum if one.key == LEARNING_RATE else None
        colours = by if by is not one else None
        drawn = charts.against(sweep.of(arm), one, found, colours)
        words = (
            f"<p>{esc(optimum_in_words(found))}</p>{_FIT if found and found.rate is not None else ''}"
            if one.key == LEARNING_RATE
            else ""
        )
        name = f"Loss against {one.key.rpartition('.')[2].replace('_', '-')}{at}"
        figures.append(_figure(name, "", drawn, f"{words}{_legend(colours)}"))
    return figures


def _legend(by: Varied | None) -> str:
    marks = "● complete  ○ pruned, its last report  × in red: a parity check disagreed, in grey: failed"
    colours = "".join(
        f'<span class="run"><i style="background:var(--{charts.COLOURS[i % len(charts.COLOURS)]})"></i>'
        f"{esc(by.key.rpartition('.')[2].replace('_', '-'))} {esc(choice)}</span> "
        for i, choice in enumerate(by.choices if by else ())
        if by
    )
    return f'<p class="hint">{colours}{marks}</p>'


def _widths(sweep: Sweep, optima: dict[str, Optimum | None]) -> str:
    plan = sweep.plan
    found = {arm.width: one for arm in plan.arms if arm.width and (one := optima[arm.study]) is not None}
    if len(found) < 2:
        return ""
    inverse = plan.width_rule == INVERSE
    rows = by_width({width: one for width, one in found.items() if width is not None})
    drawn = charts.by_width(rows, inverse)
    rule = "∝ 1/width (optim.base_width)" if inverse else "the same at every width"
    header = (
        "<thead><tr><th>width</th><th>optimal peak-lr</th><th>95 % interval</th><th>of the matrices</th></tr></thead>"
    )
    body = "".join(
        f"<tr><td>{width}</td><td>{number(rate, 3)}{'' if fitted else ' (best trial)'}</td>"
        f"<td>{'–' if low is None or high is None else f'{number(low, 3)} … {number(high, 3)}'}</td>"
        f"<td>{number(rate * rows[0][0] / width if inverse else rate, 3)}</td></tr>"
        for width, rate, low, high, fitted in rows
    )
    words = (
        f"The trials' rule: the matrices' rate is {rule}. Where the rule holds, points follow the line ∝ 1/width and "
        "the optimal peak-lr stays; where the best rate does not depend on the width, they follow the constant one."
    )
    table = f'<div class="scroll"><table>{header}<tbody>{body}</tbody></table><p class="hint">{esc(words)}</p></div>'
    return _section("widths", "Optimum against width", "", [_figure("Learning rate of the matrices", "", drawn), table])


def _curves(sweep: Sweep, arm: Arm, at: str) -> str:
    hint = (
        "Blue: the best. Grey: complete. Dashed: pruned (ends in a dot) or failed (ends in ×). Red: a check disagreed."
    )
    drawn = charts.curves(sweep.of(arm))
    return _figure(f"Training loss{at}", "nats per token", drawn, f'<p class="hint">{hint}</p>')


def _parallel(sweep: Sweep, arm: Arm, at: str) -> str:
    hint = "A line a trial, through its settings to its loss: darker is better. Red: a check disagreed."
    drawn = charts.parallel(sweep.of(arm), sweep.plan.sampling.varied)
    return _figure(f"Settings and loss{at}", "", drawn, f'<p class="hint">{hint}</p>')


def _table(sweep: Sweep) -> str:
    parts = []
    for arm in sweep.plan.arms:
        trials = sweep.of(arm)
        best = ranking(trials)
        keys = [one.key for one in sweep.plan.sampling.varied]
        heads = ["", "trial", *(key.replace("_", "-") for key in keys), "loss", "step", "checks", "resumes", ""]
        header = "".join(f"<th>{esc(head)}</th>" for head in heads)
        rows = "".join(
            _row(trial, str(best.index(trial) + 1) if trial in best else "", keys)
            for trial in (*best, *(trial for trial in trials if trial not in best))
        )
        title = "" if arm.width is None else f"<h3>width {arm.width}</h3>"
        table = f"<table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>"
        parts.append(f'{title}<div class="scroll">{table}</div>')
    return _section("ranking", "Ranking", "", parts, grid=False)


def _row(trial: Trial, place: str, keys: Sequence[str]) -> str:
    outcome = trial.outcome
    checks = f"{outcome.agreed} of {outcome.due} agreed" if outcome.due else "none"
    loss = "–" if outcome.value is None else f"{outcome.value:.4f}"
    state = _STATES.get(outcome.state, outcome.state)
    cells = [place, trial.name, *(trial.point[key] for key in keys), loss, f"{outcome.step:,}", checks]
    cells += [str(outcome.resumes) if outcome.resumes else "", state]
    kind = ' class="bad"' if outcome.state == MARKED else ""
    return f"<tr{kind}>{''.join(f'<td>{esc(cell)}</td>' for cell in cells)}</tr>"


def _given_up(sweep: Sweep) -> str:
    parts = []
    heads = {
        PRUNED: "Pruned, and why",
        MARKED: "Marked by parity: never wins, whatever its loss",
        FAILED: "Failed",
    }
    for state, head in heads.items():
        there = [trial for trial in sweep.trials if trial.outcome.state == state]
        if there:
            items = "".join(
                f"<li><b>{esc(trial.name)}</b> ({esc(', '.join(f'{k} {v}' for k, v in trial.point.items()))}): "
                f"{esc(trial.outcome.why)}</li>"
                for trial in there
            )
            parts.append(f'<div><h3>{head}</h3><ul class="uncovered">{items}</ul></div>')
    return _section("given-up", "Pruned, marked, failed", "", parts) if parts else ""


def _commands(sweep: Sweep) -> str:
    lines = "\n".join(esc(trial.line) for trial in sweep.trials if trial.line)
    return f"<section><details><summary>The command of each trial</summary><pre>{lines}</pre></details></section>"


def _figure(name: str, unit: str, drawn: str, below: str = "") -> str:
    if not drawn:
        return f'<p class="hint">{esc(name)}: nothing to draw yet.</p>'
    beside = f' <span class="unit">{esc(unit)}</span>' if unit else ""
    return (
        f'<figure class="chart"><figcaption><h3>{esc(name)}{beside}</h3></figcaption>'
        f'<div class="plot">{drawn}</div>{below}</figure>'
    )


def _section(anchor: str, title: str, hint: str, parts: Sequence[str], grid: bool = True) -> str:
    said = f'<p class="hint">{esc(hint)}</p>' if hint else ""
    style = f' style="{_GRID}"' if grid else ""
    return (
        f'<section aria-labelledby="{anchor}"><div class="title"><h2 id="{anchor}">{esc(title)}</h2>{said}</div>'
        f"<div{style}>{''.join(parts)}</div></section>"
    )
