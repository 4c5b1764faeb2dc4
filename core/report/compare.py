"""Several runs side by side: one HTML file that needs nothing but a browser."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.core.errors import UserError
from lockstep.core.files.atomic import write_atomically
from lockstep.core.report import parts
from lockstep.core.report.build import page
from lockstep.core.report.checks import Checks, read_checks
from lockstep.core.report.curves import (
    Json,
    Pairs,
    at_spikes,
    chart_of,
    field,
    metric,
    series_of,
    smooth,
    smoothing_steps,
    wire,
)
from lockstep.core.report.figures import (
    APART,
    UNKNOWN,
    Figure,
    difference,
    differences,
    figures,
    parting,
    settings,
    surroundings,
)
from lockstep.core.report.read import Run, read_run, section
from lockstep.core.report.text import esc, number
from lockstep.core.run.history import branches_begun, in_words
from lockstep.core.train.metrics import ATTENTION_LOGIT, SECONDS

MOST = 8
COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6", "c8", "c7")
# Figures of which the least `value` is marked.
MARKED = ("Best validation loss", "Last validation loss", "Tokens/s", "Memory, peak")
AXES = ("step", "tokens", "minutes")
SCRIPTS = ("page.js", "compare.js")


def build_comparison(folders: Sequence[Path], warn: Callable[[str], None] = lambda note: None) -> str:
    """Compare 2 to 8 run directories as HTML; the others are compared with the first one.

    Raises UserError if there are too many, one is named twice, or one is no run with records.
    """
    if not 2 <= len(folders) <= MOST:
        raise UserError(f"{len(folders)} runs: a comparison takes 2 to {MOST}")
    twice = [path for path, times in Counter(folder.resolve() for folder in folders).items() if times > 1]
    if twice:
        raise UserError(f"{twice[0]} is named twice: a comparison takes different runs")
    runs = [read_run(folder) for folder in folders]
    names = labels(runs)
    checks, notes = [], []
    for run, name in zip(runs, names, strict=True):
        own: list[str] = []
        checks.append(read_checks(run.path / "parity.jsonl", run.about, own))
        notes += [f"{name}: {note}" for note in (*run.notes, *own)]
    for note in notes:
        warn(note)
    notes += [
        f"{name}: settings were changed on purpose: {in_words(resume)}."
        for run, name in zip(runs, names, strict=True)
        for resume in branches_begun(run.about)
    ]
    specs = charts(runs, names)
    every = [step for run in runs for step in (run.records[0]["step"], run.records[-1]["step"])]
    # No marks: a branch is one run's, at a step, and these curves are drawn by tokens and minutes as well.
    data = {"domain": [min(every), max(every)], "charts": specs, "marks": [], "checks": [], "axes": AXES}
    body = "\n".join(
        [
            '<header class="head"><p class="eyebrow">Lockstep comparison</p>'
            f"<h1>{esc(' · '.join(names))}</h1></header>",
            _figures(runs, names, checks),
            parts.notes(notes),
            _differing("settings", "Settings that differ", "Setting", [settings(run) for run in runs], names),
            _partings(runs, names),
            _controls(names),
            _frames(specs),
            _differing("else", "Other differences", "", [surroundings(run) for run in runs], names),
        ]
    )
    return page(f"{' · '.join(names)} · Lockstep comparison", body, data, SCRIPTS)


def write_comparison(folders: Sequence[Path], out: Path, warn: Callable[[str], None] = lambda note: None) -> Path:
    """Write the comparison to `out`, whole or not at all; return it. Raises UserError as `build_comparison`."""
    write_atomically(out, [build_comparison(folders, warn).encode("utf-8")])
    return out


def labels(runs: Sequence[Run]) -> list[str]:
    """Return the runs' names; of those that share one, their folders."""
    names = [parts.name(run) for run in runs]
    shared = {name for name, times in Counter(names).items() if times > 1}
    return [str(run.path) if name in shared else name for run, name in zip(runs, names, strict=True)]


def charts(runs: Sequence[Run], names: Sequence[str]) -> list[Json]:
    """Return overlaid curves, each with its values on every axis of `AXES`."""

    def lines(of: Callable[[Run], Pairs], style: str = "line") -> list[Json]:
        return [
            _series(run, name, number, style, of(run))
            for number, (run, name) in enumerate(zip(runs, names, strict=True))
        ]

    def smoothed(of: Callable[[Run], Pairs]) -> list[Json]:
        return lines(lambda run: smooth(of(run), smoothing_steps(len(run.records))))

    loss: list[Json] = []
    for level, factor in (("none", 0), ("light", 1), ("strong", 5)):
        found = lines(partial(_smoothed_loss, factor=factor))
        loss += [{**series, "level": level} for series in found]
    peaks = lines(lambda run: at_spikes(run.records), "peaks")
    apart = [
        _series(run, name, number, "line", difference(runs[0], run)[1])
        for number, (run, name) in enumerate(zip(runs, names, strict=True))
        if number
    ]
    specs = [
        chart_of("loss", "Training loss", "nats per token", [*loss, *peaks]),
        chart_of(
            "val", "Validation loss", "nats per token", lines(lambda run: metric(run.records, "val/loss"), "dots")
        ),
        chart_of(
            "apart",
            f"Training loss minus that of {names[0]}",
            "nats per token, smoothed",
            apart,
            rules=[{"label": "", "y": 0}],
        ),
        chart_of("lr", "Learning rate", "", lines(lambda run: field(run.records, "lr")), zero=True),
        chart_of(
            "grad", "Gradient norm", "before clipping", smoothed(lambda run: field(run.records, "grad_norm")), log=True
        ),
        chart_of(
            "update",
            "Update-to-weight ratio",
            "matrices",
            lines(lambda run: metric(run.records, "update_ratio/matrices")),
            log=True,
        ),
        chart_of(
            "attention",
            "Largest attention logit",
            "",
            lines(lambda run: metric(run.records, f"{ATTENTION_LOGIT}max")),
            zero=True,
        ),
        chart_of(
            "speed",
            "Throughput",
            "tokens per second",
            smoothed(lambda run: field(run.records, "tokens_per_second")),
            zero=True,
        ),
    ]
    return [spec for spec in specs if spec["series"]]


def _smoothed_loss(run: Run, *, factor: int) -> Pairs:
    loss = field(run.records, "loss")
    return smooth(loss, factor * smoothing_steps(len(loss))) if factor else loss


def _series(run: Run, name: str, number: int, style: str, pairs: Pairs) -> Json:
    series = series_of(name, COLOURS[number], style, pairs)
    places = _places(run)
    xs = {axis: [wire(places[step][i], 7) for step in series["x"]] for i, axis in enumerate(AXES)}
    return {**series, "run": number, "xs": xs}


def _places(run: Run) -> dict[int, tuple[float, float, float]]:
    """Return (step, tokens so far, minutes so far) by step."""
    found: dict[int, tuple[float, float, float]] = {}
    tokens, spent = 0, 0.0
    for record in run.records:
        tokens += record["tokens"] if isinstance(record.get("tokens"), int) else 0
        times = [v for k, v in section(record, "host").items() if k.startswith(SECONDS)]
        own = record.get("seconds")
        seconds = sum(times) if times else own if isinstance(own, int | float) else 0.0
        spent += seconds if math.isfinite(seconds) else 0.0
        found[record["step"]] = record["step"], tokens, spent / 60
    return found


# The page


def _chip(number: int, name: str) -> str:
    return f'<span class="run"><i style="background:var(--{COLOURS[number]})"></i>{esc(name)}</span>'


def _header(first: str, names: Sequence[str]) -> str:
    cells = "".join(f'<th scope="col" class="n">{_chip(i, name)}</th>' for i, name in enumerate(names))
    return f'<thead><tr><th scope="col">{first}</th>{cells}</tr></thead>'


def _figures(runs: Sequence[Run], names: Sequence[str], checks: Sequence[Checks]) -> str:
    each = [figures(run, check) for run, check in zip(runs, checks, strict=True)]
    shown = [name for name in each[0] if any(one[name].text != UNKNOWN for one in each)]
    rows = "".join(_figure_row(name, [one[name] for one in each]) for name in shown)
    return _section(
        "figures",
        "Figures",
        f'<table class="narrow">{_header("", names)}<tbody>{rows}</tbody></table>',
        "The best is bold.",
    )


def _figure_row(name: str, found: Sequence[Figure]) -> str:
    values = [one.value for one in found if one.value is not None]
    best = min(values) if name in MARKED and len(values) > 1 and min(values) < max(values) else None
    cells = ""
    for one in found:
        text = esc(one.text) if best is None or one.value != best else f"<b>{esc(one.text)}</b>"
        cells += f'<td class="n">{text}<small>{esc(one.beside)}</small></td>'
    return f'<tr><th scope="row">{esc(name)}</th>{cells}</tr>'


def _partings(runs: Sequence[Run], names: Sequence[str]) -> str:
    items = []
    for number_, (run, name) in enumerate(zip(runs[1:], names[1:], strict=True), 1):
        items.append(f"<li>{_chip(number_, name)}: {_parting(runs[0], run)}</li>")
    hint = (
        f"Held against {names[0]}. Curves are apart where their smoothed difference stays beyond {APART:g} standard "
        "errors of its own noise."
    )
    return _section("parting", "Where the curves part", f'<ul class="partings">{"".join(items)}</ul>', hint)


def _parting(one: Run, other: Run) -> str:
    found = parting(one, other)
    if not found.common:
        return "no step in common."
    if found.bits is None and found.batch is None:
        return f"the same losses, bit for bit, in all {found.common:,} common steps."
    said = [
        "the same batches throughout" if found.batch is None else f"other batches from step {found.batch:,}",
        "the same losses throughout" if found.bits is None else f"other losses from step {found.bits:,}",
        f"apart for good from step {found.apart:,}" if found.apart is not None else "not apart at the end",
    ]
    end = f"; loss {found.difference:+.4f} ± {number(2 * found.error, 2)} at the last of {found.common:,} common steps."
    return ", ".join(said) + (end if math.isfinite(found.error) else ".")


def _controls(names: Sequence[str]) -> str:
    chips = "".join(
        f'<button type="button" data-run="{i}" aria-pressed="true">{_chip(i, name)}</button>'
        for i, name in enumerate(names)
    )
    return (
        '<section aria-labelledby="curves"><div class="title"><h2 id="curves">Curves</h2><p class="hint">Move over a '
        "chart to read it, click to pin, arrow keys to walk.</p></div>"
        f'<div class="controls"><div class="legend runs">{chips}</div>'
        f"{parts.choice('axis', 'By', AXES, 'step')}"
        f"{parts.choice('smoothing', 'Smoothing', ('none', 'light', 'strong'), 'light')}</div>"
    )


def _frames(specs: Sequence[Mapping[str, Any]]) -> str:
    return (
        '<noscript><p class="notes">Charts are drawn by the script in this page.</p></noscript>'
        '<div id="charts" class="compared" tabindex="0" role="group" aria-label="Charts">'
        f"{parts.figures_of(specs)}</div></section>"
    )


def _differing(anchor: str, title: str, first: str, each: list[dict[str, Any]], names: Sequence[str]) -> str:
    found = differences(each)
    # A setting that another version did not have is no choice of the run's.
    told = {key: values for key, values in found.items() if len({repr(v) for v in values if v is not None}) > 1}
    rest = {key: values for key, values in found.items() if key not in told}
    body = _value_table(first, told, names) if told else '<p class="hint">None.</p>'
    if rest:
        summary = f"<summary>and {len(rest)} that only some of the runs have</summary>"
        body += f"<details>{summary}{_value_table(first, rest, names)}</details>"
    return _section(anchor, title, body, "")


def _value_table(first: str, rows: Mapping[str, Sequence[Any]], names: Sequence[str]) -> str:
    body = ""
    for key, values in rows.items():
        cells = "".join(f'<td class="n">{UNKNOWN if v is None else esc(_shown(v))}</td>' for v in values)
        body += f'<tr><th scope="row"><code>{esc(key)}</code></th>{cells}</tr>'
    return f'<table class="narrow">{_header(first, names)}<tbody>{body}</tbody></table>'


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value) or "empty"


def _section(anchor: str, title: str, body: str, hint: str) -> str:
    said = f'<p class="hint">{esc(hint)}</p>' if hint else ""
    return (
        f'<section aria-labelledby="{anchor}"><div class="title"><h2 id="{anchor}">{title}</h2>{said}</div>'
        f'<div class="scroll">{body}</div></section>'
    )
