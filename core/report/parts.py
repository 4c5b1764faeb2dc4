"""The parts of the page that are plain HTML: head, facts, the table of stages, frames for what the script draws."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from lockstep.core.report.checks import Checks, StageSummary
from lockstep.core.report.curves import field, metric
from lockstep.core.report.heatmap import chain
from lockstep.core.report.read import Run, section
from lockstep.core.report.text import count, esc, number, plural
from lockstep.core.report.words import DISPLAY, SCOPES, interval
from lockstep.core.run.info import CHANGED


def name(run: Run) -> str:
    """Return the run's name, else its folder's."""
    return str(run.about.get("name") or run.config.get("name") or run.path.resolve().name)


def entropies(run: Run) -> dict[str, float]:
    """Return the entropies of the validation data by label, where they are known."""
    data = section(run.about, "data")
    found = {label: data.get(f"val_{label}_entropy") for label in ("unigram", "bigram")}
    known = {k: v for k, v in found.items() if isinstance(v, int | float) and math.isfinite(v)}
    return {f"{label} entropy": float(value) for label, value in known.items()}


def head(run: Run) -> str:
    """Return the title of the page and the name of its run."""
    return f'<header class="head"><p class="eyebrow">Lockstep training report</p><h1>{esc(name(run))}</h1></header>'


def facts(run: Run) -> str:
    """Return the run in numbers, and its hardware."""
    first, last = run.records[0], run.records[-1]
    changed = section(run.about, CHANGED).get("train.steps")
    planned = int(changed) if changed else section(run.config, "train").get("steps")
    tokens = sum(int(r["tokens"]) for r in run.records if isinstance(r.get("tokens"), int))
    seconds = sum(s for _, s in field(run.records, "seconds") if math.isfinite(s))
    speeds = [v for _, v in field(run.records, "tokens_per_second") if math.isfinite(v)]
    validation = metric(run.records, "val/loss")
    tiles = [
        ("Steps", f"{last['step']:,}", f"of {planned:,} planned" if isinstance(planned, int) else ""),
        ("Tokens", count(tokens), f"{tokens:,}" if tokens >= 10_000 else ""),
        ("Training loss", number(float(last["loss"])), f"from {number(float(first['loss']))}, last step"),
        (
            "Validation loss",
            number(validation[-1][1]) if validation else "—",
            " · ".join(f"{k.removesuffix(' entropy')} {number(v, 3)}" for k, v in entropies(run).items())
            or (f"step {validation[-1][0]:,}" if validation else "never due"),
        ),
        (
            "Tokens/s",
            count(statistics.median(speeds)) if speeds else "—",
            f"median; {_duration(seconds)} in steps",
        ),
        _parameters(run),
    ]
    boxes = "".join(
        f'<div class="tile"><dt>{esc(label)}</dt><dd>{esc(value)}<small>{esc(beside)}</small></dd></div>'
        for label, value, beside in tiles
    )
    return f'<dl class="tiles">{boxes}</dl>\n<dl class="about">{_about(run)}</dl>'


def _parameters(run: Run) -> tuple[str, str, str]:
    value = run.about.get("parameters")
    if not isinstance(value, int):
        return "Parameters", "—", ""
    model = section(run.config, "model")
    shape = [f"{model[k]} {k}" for k in ("layers",) if k in model]
    shape += [f"width {model['hidden']}"] if "hidden" in model else []
    return "Parameters", count(value), ", ".join(shape) or f"{value:,}"


def _about(run: Run) -> str:
    data, hardware = section(run.about, "data"), section(run.about, "hardware")
    device = next((hardware[k] for k in ("device", "gpu", "name", "cpu") if hardware.get(k)), None)
    precision = section(run.config, "precision").get("policy")
    plain = {k: v for k, v in hardware.items() if isinstance(v, str | int | float)}
    rest = {k: v for k, v in plain.items() if v != device}
    items = [
        ("Device", device),
        ("Hardware", ", ".join(f"{k} {v}" for k, v in rest.items())),
        ("Backend", " · ".join(str(x) for x in (run.about.get("backend"), precision) if x)),
        ("Versions", ", ".join(f"{k} {v}" for k, v in section(run.about, "versions").items())),
        ("Git commit", _short(run.about.get("git_commit"))),
        ("Dataset", " · ".join(str(x) for x in (data.get("path"), _short(data.get("fingerprint"))) if x)),
        ("Tokenizer", _short(data.get("tokenizer_fingerprint"))),
        ("Weights & Biases", run.about.get("wandb_id")),
        ("Created", run.about.get("created")),
    ]
    return "".join(f"<div><dt>{esc(k)}</dt><dd>{esc(v)}</dd></div>" for k, v in items if v)


def _short(value: object) -> str:
    text = str(value or "")
    return text if len(text) <= 16 else f"{text[:12]}…"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def notes(items: Sequence[str]) -> str:
    """Return notes on the files as HTML; nothing if there are none."""
    if not items:
        return ""
    return '<aside class="notes" aria-label="Notes on the files"><ul>' + _list(items) + "</ul></aside>"


def _list(items: Iterable[str]) -> str:
    return "".join(f"<li>{esc(item)}</li>" for item in items)


def figures_of(specs: Sequence[Mapping[str, Any]], more: Mapping[str, str] | None = None) -> str:
    """Return a frame for each chart; more: additions to its text alternative, by the chart's id."""
    frames = []
    for spec in specs:
        summary = spec["summary"] + (more or {}).get(spec["id"], "")
        unit = f' <span class="unit">{esc(spec["unit"])}</span>' if spec["unit"] else ""
        frames.append(
            f'<figure class="chart" id="chart-{esc(spec["id"])}"><figcaption>'
            f"<h3>{esc(spec['title'])}{unit}</h3>"
            f'<div class="legend"></div></figcaption>'
            f'<div class="plot" role="img" aria-label="{esc(summary)}"></div></figure>'
        )
    return "".join(frames)


def chart_frames(specs: Sequence[Mapping[str, Any]], checks: Checks) -> str:
    """Return an empty frame for each chart, with its text alternative; the page's script draws into it."""
    shares = ", ".join(f"{n} {DISPLAY.get(v, v)}" for v, n in checks.counts.items())
    said = {"loss": f" Parity checks: {shares}."} if checks.lines else {}
    return (
        f"{_opening('curves', 'Curves')}"
        '<p class="hint">One step axis. Move over a chart to read it, click to pin the step, '
        "arrow keys to walk.</p></div>"
        '<noscript><p class="notes">Charts and heatmap are drawn by the script in this page.</p></noscript>'
        '<div id="charts" tabindex="0" role="group" aria-label="Charts by step">'
        f"{figures_of(specs, said)}</div></section>"
    )


def parity(heat: Mapping[str, Any] | None, checks: Checks) -> str:
    """Return the frames of the heatmap and of the error's growth through depth, with the controls of both."""
    opening = _opening("parity", "Parity with the reference")
    if heat is None:
        text = "Nothing was compared with the reference." if checks.lines else "No step was checked."
        return f'{opening}</div><p class="hint">{text}</p></section>'
    bad = sum(1 for _, verdict, _ in checks.lines if verdict == "disagreed")
    summary = (
        f"Heatmap of {plural(len(heat['lines']), 'stage')} by layer and by "
        f"{plural(len(heat['steps']), 'checked step')}; {plural(bad, 'check')} disagreed. "
        "The table below names the worst comparison of each stage."
    )
    buttons = "".join(
        f'<button type="button" data-go="{go}">{go.replace("_", " ")}</button>'
        for go in ("first", "first_bad", "worst", "latest")
    )
    return (
        f'{opening}<p class="hint">Stages in the order of the chain. Left: by layer, at the chosen step. '
        "Right: by step, in the chosen layer. Colour is strain, a value against its bound.</p></div>"
        '<div class="controls">'
        f"{choice('scope', 'Fed', ('all', 'local', 'end_to_end', 'over_steps'), 'local')}"
        f"{choice('phase', 'Phase', ('all', 'forward', 'backward', 'the rest'), 'all')}"
        '<span class="stepper"><label>Step <input id="at" type="range" min="0" value="0"></label>'
        f'<output id="at-step"></output>{buttons}</span></div>'
        f'<div id="map" tabindex="0" role="application" aria-label="{esc(summary)} Arrow keys walk, Enter chooses.">'
        '<canvas></canvas></div><p id="map-said" class="unseen" aria-live="polite"></p><div id="map-legend"></div>'
        '<div class="title depth"><h3>Error through depth</h3>'
        '<p class="hint">At the chosen step: every comparison at its place in the chain; the line is end to end, '
        "dots are local. Grey: end to end at the first step shown.</p></div>"
        '<div id="depth"></div></section>'
    )


def choice(name: str, label: str, options: Sequence[str], chosen: str) -> str:
    """Return radio buttons of which one is chosen."""
    radios = "".join(
        f'<label><input type="radio" name="{name}" value="{option}"{" checked" if option == chosen else ""}>'
        f"<span>{option.replace('_', ' ')}</span></label>"
        for option in options
    )
    return f'<fieldset class="choice"><legend>{label}</legend>{radios}</fieldset>'


def bias_frame(curves: Mapping[str, Any] | None) -> str:
    """Return the frame of the bias curves; nothing without sums."""
    if curves is None:
        return ""
    left = f" {plural(curves['left'], 'other comparison')} not drawn." if curves["left"] else ""
    return (
        f"{_opening('bias', 'Bias over steps')}"
        '<p class="hint">Candidate minus twin, signed and summed over the checks, in units of the twin&#x27;s own '
        "error: bounded when honest, growing when biased. The worst of each stage, nearest to its bound first."
        f"{left}</p></div>"
        '<div id="bias-curves"></div></section>'
    )


def stages(checks: Checks) -> str:
    """Return the worst comparison of each stage over all checks: broken ones first; in the order of the chain."""
    if not checks.stages:
        return ""
    origin = (checks.first_bad and checks.first_bad.origin) or {}
    named = (origin.get("phase"), origin.get("stage"))
    order = sorted(checks.stages, key=lambda at: chain(at[1], at[0], None))
    order.sort(key=lambda at: (at != named, checks.stages[at].worst.ok))
    heads = (
        ("Stage", ""),
        ("Worst comparison", ""),
        ("Step", "n"),
        ("Measure", ""),
        ("Value", "n"),
        ("Bound", "n"),
        ("Basis of the bound", ""),
        ("Broken in", "n"),
    )
    header = "".join(f'<th scope="col" class="{tone}">{label}</th>' for label, tone in heads)
    rows = "".join(_stage_row(checks.stages[at], at == named) for at in order)
    return (
        f"{_opening('stages', 'Worst comparison of each stage')}"
        '<p class="hint">Over all checks: the origin, then what else broke, then the rest, '
        "in the order of the chain.</p></div>"
        f'<div class="scroll"><table><thead><tr>{header}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _stage_row(stage: StageSummary, is_origin: bool) -> str:
    worst = stage.worst
    key, measure = worst.key, worst.measure
    layer = "" if key.layer is None else f", layer {key.layer}"
    if measure is None:
        cells = '<td colspan="3">nothing compared</td><td></td>'
    else:
        basis = measure.basis + (f" ({worst.note})" if worst.note else "")
        cells = (
            f'<td>{esc(measure.name.replace("_", " "))}</td><td class="n"><b>{number(measure.value)}</b></td>'
            f'<td class="n">{interval(measure.low, measure.high)}</td><td class="basis">{esc(basis)}</td>'
        )
    mark = "✓" if worst.ok else "✕"
    since = f"<small>first at step {stage.first_broken:,}</small>" if stage.first_broken is not None else ""
    tone = "good" if worst.ok else "bad"
    origin = '<span class="origin">origin</span>' if is_origin else ""
    spoken = "held" if worst.ok else "broken"
    tap, scope, phase = (quote(text, errors="replace") for text in (key.tap, key.scope, key.phase))
    link = f"#step={worst.step}&tap={tap}&scope={scope}&phase={phase}"
    return (
        f'<tr class="{tone}"><th scope="row"><span class="mark" role="img" aria-label="{spoken}">{mark}</span> '
        f"{esc(key.stage)}{origin}<small>{esc(key.phase)}</small></th>"
        f'<td><a href="{esc(link)}"><code>{esc(key.tap)}</code></a>'
        f'<small>{esc(SCOPES.get(key.scope, key.scope) + layer)}</small></td><td class="n">{worst.step:,}</td>{cells}'
        f'<td class="n">{len(stage.broken)} of {len(stage.checks)}{since}</td></tr>'
    )


def _opening(anchor: str, title: str) -> str:
    return f'<section aria-labelledby="{anchor}"><div class="title"><h2 id="{anchor}">{title}</h2>'


def sample(run: Run) -> str:
    """Return the last text that the model wrote."""
    written = [(r["step"], r["sample"]) for r in run.records if r.get("sample")]
    if not written:
        return ""
    step, text = written[-1]
    return (
        f"{_opening('sample', 'Last sample')}"
        f'<p class="hint">Step {step:,}</p></div><pre class="sample" dir="auto">{esc(text)}</pre></section>'
    )


def config(run: Run) -> str:
    """Return the resolved configuration, folded."""
    if not run.config_text:
        return ""
    folded = f"<summary>Resolved configuration</summary><pre>{esc(run.config_text)}</pre>"
    return f"<section><details>{folded}</details></section>"
