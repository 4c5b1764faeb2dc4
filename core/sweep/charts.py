"""The charts of a sweep: curves, loss against learning rate, optimum against width, parallel coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep.core.report.text import number
from lockstep.core.sweep.drawing import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    axis,
    cross,
    dot,
    frame,
    line,
    text,
    title,
)
from lockstep.core.sweep.fit import Optimum
from lockstep.core.sweep.outcome import COMPLETE, FAILED, MARKED, PRUNED
from lockstep.core.sweep.space import Varied
from lockstep.core.sweep.sweep import Trial, ranking

COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c8", "c7")
BEST = "stroke:var(--c1);stroke-width:2.6"
# Lines of each state, in the order in which they are drawn.
STROKES = {
    FAILED: "stroke:var(--skip);stroke-width:1.2;stroke-dasharray:2 3",
    PRUNED: "stroke:var(--c5);stroke-width:1.2;stroke-dasharray:5 3",
    COMPLETE: "stroke:var(--c7);stroke-width:1.2;opacity:0.6",
    MARKED: "stroke:var(--bad);stroke-width:1.6",
}
# Characters of a value at an axis.
_LABEL = 9
_X, _Y = (LEFT, WIDTH - RIGHT), (HEIGHT - BOTTOM, TOP)


def said(trial: Trial) -> str:
    """Return a trial in one line, for a tooltip."""
    value = trial.outcome.value
    loss = "" if value is None else f", loss {value:.4f}"
    settings = ", ".join(f"{key} {text}" for key, text in trial.point.items())
    return f"{trial.name}: {settings}{loss}, {trial.outcome.state}"


def curves(trials: Sequence[Trial]) -> str:
    """Return the training curves of all trials; empty if none has one."""
    there = [trial for trial in trials if trial.outcome.curve]
    if not there:
        return ""
    losses = [loss for trial in there for _, loss in trial.outcome.curve if math.isfinite(loss)]
    # A trial that diverges must not flatten the others: nothing is shown above the highest first loss.
    first = max((trial.outcome.curve[0][1] for trial in there if math.isfinite(trial.outcome.curve[0][1])), default=1)
    x = axis([step for trial in there for step, _ in trial.outcome.curve], *_X, room=0.02)
    y = axis([min(loss, first) for loss in losses], *_Y)
    best = ranking(there)[:1]
    body = []
    for state, style in STROKES.items():
        for trial in there:
            if trial.outcome.state == state and trial not in best:
                body += _curve(trial, x, y, style)
    for trial in best:
        body += _curve(trial, x, y, BEST)
    return frame(x, y, "step", "training loss", body)


def _curve(trial: Trial, x: Axis, y: Axis, style: str) -> list[str]:
    points = [(x.at(step), y.at(loss)) for step, loss in trial.outcome.curve if math.isfinite(loss)]
    drawn = [line(points, style, said(trial))]
    if points and trial.outcome.state == PRUNED:
        drawn.append(dot(*points[-1], "fill:var(--c5)", said(trial), 3))
    if points and trial.outcome.state == FAILED:
        drawn.append(cross(*points[-1], "stroke:var(--skip)", said(trial)))
    return drawn


def against(trials: Sequence[Trial], one: Varied, found: Optimum | None, by: Varied | None) -> str:
    """Return the loss of each trial against a setting of numbers, with the fitted optimum if there is one.

    by: a list whose values give points their colours.
    """
    there = [trial for trial in trials if _shown_loss(trial) is not None or trial.outcome.state == FAILED]
    rates = [float(trial.point[one.key]) for trial in there]
    losses = [loss for trial in there if (loss := _shown_loss(trial)) is not None and math.isfinite(loss)]
    if not losses:
        return ""
    log = one.log or (min(rates) > 0 and max(rates) / min(rates) > 20)
    # The best trials fill the chart; what lies far above them is put at its upper edge.
    cut = sorted(losses)[int(0.85 * (len(losses) - 1))]
    winner = [trial.outcome.value for trial in ranking(there)[:1] if trial.outcome.value is not None]
    top = max(cut + 0.6 * (cut - min(losses)), min(losses) + 1e-6, *winner)
    x = axis(rates, *_X, log=log, room=0.05)
    y = axis([*(min(loss, top) for loss in losses)], *_Y, room=0.1)
    body: list[str] = []
    if found is not None:
        body += _optimum(found, x, y)
    for trial in sorted(there, key=lambda trial: list(STROKES).index(trial.outcome.state)):
        at, loss = x.at(float(trial.point[one.key])), _shown_loss(trial)
        body.append(_mark(trial, at, y, by))
        if loss is not None and math.isfinite(loss) and loss > y.high:
            left = at < sum(_X) / 2
            body.append(text(at + (8 if left else -8), y.at(loss) + 4, f"↑ {loss:.2f}", "start" if left else "end"))
    return frame(x, y, one.key.replace("_", "-"), "loss", body)


def _shown_loss(trial: Trial) -> float | None:
    """Return the objective, or, of a trial that was pruned, its last report."""
    if trial.outcome.value is not None:
        return trial.outcome.value
    if trial.outcome.state in (PRUNED, MARKED) and trial.outcome.reports:
        return trial.outcome.reports[max(trial.outcome.reports)]
    return None


def _mark(trial: Trial, at: float, y: Axis, by: Varied | None) -> str:
    loss = _shown_loss(trial)
    if loss is None or not math.isfinite(loss) or trial.outcome.state == FAILED:
        return cross(at, TOP + 6, "stroke:var(--skip)", said(trial))
    place = y.at(loss)
    if trial.outcome.state == MARKED:
        return cross(at, place, "stroke:var(--bad)", said(trial))
    colour = f"var(--{colour_of(trial, by)})"
    if trial.outcome.state == PRUNED:
        return dot(at, place, f"fill:var(--bg);stroke:{colour};stroke-width:1.6", said(trial), 4)
    return dot(at, place, f"fill:{colour}", said(trial))


def colour_of(trial: Trial, by: Varied | None) -> str:
    """Return the colour of a trial by its value in a list."""
    return COLOURS[by.choices.index(trial.point[by.key]) % len(COLOURS)] if by else COLOURS[0]


def _optimum(found: Optimum, x: Axis, y: Axis) -> list[str]:
    drawn = []
    bottom = HEIGHT - BOTTOM
    if found.rate is not None and found.low is not None and found.high is not None:
        left, right = x.at(found.low), x.at(found.high)
        drawn.append(
            f'<rect x="{left:.1f}" y="{TOP}" width="{max(right - left, 1):.1f}" height="{bottom - TOP}" '
            f'style="fill:var(--c1);opacity:0.12">{title("95 % interval of the optimum")}</rect>'
        )
    drawn.append(line([(x.at(rate), y.at(loss)) for rate, loss in found.curve], "stroke:var(--c1);stroke-width:1.4"))
    if found.rate is not None and x.low <= found.rate <= x.high:
        at = x.at(found.rate)
        drawn.append(line([(at, TOP), (at, bottom)], "stroke:var(--c1);stroke-width:1.2;stroke-dasharray:5 4"))
        label = f"optimum {number(found.rate, 3)}"
        # On the side where there is room for it.
        drawn.append(text(at + 4, bottom - 6, label) if at < sum(_X) / 2 else text(at - 4, bottom - 6, label, "end"))
    return drawn


def by_width(rows: Sequence[tuple[int, float, float | None, float | None, bool]], inverse: bool) -> str:
    """Return the optimal learning rate of the matrices against the width, beside ∝ 1/width and a constant one.

    rows: width, optimal `optim.peak_lr`, its interval, and whether it was fitted. inverse: the matrices' rate is that
    times first width / width (optim.base_width); else the rate itself.
    """
    first, start = rows[0][0], rows[0][1]

    def of_matrices(width: int, rate: float) -> float:
        return rate * first / width if inverse else rate

    widths = [width for width, *_ in rows]
    ends = [min(widths), max(widths)]
    shown = [of_matrices(width, value) for width, *values, _ in rows for value in values if value is not None]
    x = axis(widths, *_X, log=True, room=0.12)
    expected = {"∝ 1/width": [start * first / w for w in ends], "constant": [start, start]}
    y = axis([*shown, *(value for values in expected.values() for value in values)], *_Y, log=True, room=0.12)
    body = []
    for (name, values), style in zip(expected.items(), ("stroke:var(--c3)", "stroke:var(--c2)"), strict=True):
        places = [(x.at(width), y.at(value)) for width, value in zip(ends, values, strict=True)]
        body.append(line(places, f"{style};stroke-width:1.4;stroke-dasharray:6 4", name))
        middle = ((places[0][0] + places[1][0]) / 2, (places[0][1] + places[1][1]) / 2)
        body.append(text(middle[0], middle[1] - 7, name))
    for width, rate, low, high, fitted in rows:
        at = x.at(width)
        if low is not None and high is not None:
            places = [(at, y.at(of_matrices(width, low))), (at, y.at(of_matrices(width, high)))]
            body.append(line(places, "stroke:var(--c1);stroke-width:2"))
        words = f"width {width}: peak-lr {number(rate, 3)}{'' if fitted else ', the best trial (no fit)'}"
        style = "fill:var(--c1)" if fitted else "fill:var(--bg);stroke:var(--c1);stroke-width:1.8"
        body.append(dot(at, y.at(of_matrices(width, rate)), style, words, 5))
    return frame(x, y, "width", "optimal learning rate of the matrices", body, widths)


def parallel(trials: Sequence[Trial], varied: Sequence[Varied]) -> str:
    """Return parallel coordinates: a line a trial through its settings to its loss; empty if none has a loss."""
    there = [trial for trial in trials if (loss := _shown_loss(trial)) is not None and math.isfinite(loss)]
    if not there:
        return ""
    best = {trial.name: rank for rank, trial in enumerate(ranking(there))}
    columns = len(varied) + 1
    xs = [LEFT + i * (WIDTH - LEFT - 2 * RIGHT - 30) / max(columns - 1, 1) for i in range(columns)]
    axes = [_coordinate(one, there) for one in varied]
    finite = [loss for trial in there if (loss := _shown_loss(trial)) is not None]
    losses = axis(finite, HEIGHT - BOTTOM, TOP + 14, room=0.02)
    body: list[str] = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="settings and loss of each trial">']
    for trial in sorted(there, key=lambda trial: -best.get(trial.name, len(best))):
        places = [(x, one[trial.point[key.key]]) for x, one, key in zip(xs, axes, varied, strict=False)]
        loss = _shown_loss(trial)
        assert loss is not None
        places.append((xs[-1], losses.at(loss)))
        body.append(line(places, _stroke(trial, best), said(trial)))
    for x, one in zip(xs, axes, strict=False):
        body.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP + 14}" y2="{HEIGHT - BOTTOM}"/>')
        for value in _ends(one):
            body.append(text(x - 5, one[value] + 4, _label(value), "end"))
    x = xs[-1]
    body.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP + 14}" y2="{HEIGHT - BOTTOM}"/>')
    body += [text(x + 5, losses.at(tick) + 4, number(tick, 4)) for tick in losses.ticks]
    names = [*(one.key.rpartition(".")[2].replace("_", "-") for one in varied), "loss"]
    body += [text(x, HEIGHT - BOTTOM + 20, name, "middle") for x, name in zip(xs, names, strict=True)]
    return "\n".join([*body, "</svg>"])


def _stroke(trial: Trial, best: dict[str, int]) -> str:
    if trial.name not in best:
        return STROKES.get(trial.outcome.state, STROKES[FAILED])
    rank = best[trial.name]
    if not rank:
        return BEST
    share = 1 - rank / max(len(best) - 1, 1)
    return f"stroke:var(--c1);stroke-width:1.2;opacity:{0.2 + 0.6 * share:.2f}"


def _coordinate(one: Varied, trials: Sequence[Trial]) -> dict[str, float]:
    """Return the place of each value of a setting on its axis."""
    bottom, top = HEIGHT - BOTTOM, TOP + 14
    if one.is_range:
        scale = Axis(one.low, one.high, bottom, top, one.log)
        values = {*(trial.point[one.key] for trial in trials), *one.ends}
        return {value: scale.at(float(value)) for value in values}
    room = (bottom - top) / max(len(one.choices) - 1, 1)
    if len(one.choices) == 1:
        return {one.choices[0]: (bottom + top) / 2}
    return {choice: bottom - i * room for i, choice in enumerate(one.choices)}


def _label(value: str) -> str:
    if len(value) <= _LABEL:
        return value
    return number(float(value), 3) if _is_number(value) else f"{value[: _LABEL - 1]}…"


def _ends(places: dict[str, float]) -> list[str]:
    """Return the values to write at an axis: all of a short list, else both ends."""
    if len(places) <= 6 and not all(_is_number(value) for value in places):
        return list(places)
    ordered = sorted(places, key=lambda value: places[value])
    return ordered if len(places) <= 4 else [ordered[0], ordered[-1]]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
