"""From a run directory to one HTML file that needs nothing but a browser."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from lockstep.core.files.atomic import write_atomically
from lockstep.core.report import parts, words
from lockstep.core.report.bias_curves import bias_curves
from lockstep.core.report.checks import read_checks
from lockstep.core.report.curves import charts
from lockstep.core.report.heatmap import encode
from lockstep.core.report.read import read_run
from lockstep.core.report.seeing import events, more_charts
from lockstep.core.report.text import embed, esc
from lockstep.core.run.history import branches_begun, in_words

# One script, in this order: each file speaks of what stands before it.
SCRIPTS = ("page.js", "cells.js", "map.js", "depth.js", "bias.js", "links.js")
# The page may load nothing and run nothing but its own script: what it shows is in it, and names in it are anybody's.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{}'; base-uri 'none'; form-action 'none'"


def build_report(run_dir: Path, warn: Callable[[str], None] = lambda note: None) -> str:
    """The report on a run directory as HTML.

    What is damaged or torn is left out, noted on the page, and told to `warn`.

    Raises:
        UserError: there is no complete record, or an intact line of records.jsonl or parity.jsonl cannot be
            understood.
    """
    run = read_run(run_dir)
    notes: list[str] = []
    checks = read_checks(run_dir / "parity.jsonl", run.about, notes)
    heat = encode(checks)
    curves = bias_curves(run_dir / "observations" / "bias.npz", checks, notes)
    for note in [*run.notes, *notes]:
        warn(note)
    if heat and heat["left_out"]:
        shown = f"{len(heat['steps'])} of {len(checks.steps)}"
        notes.append(f"The heatmap shows {shown} checked steps, broken ones first.")
    if heat and len(heat["detailed"]) < len(heat["steps"]):
        some = f"{len(heat['detailed'])} of {len(heat['steps'])}"
        notes.append(f"Values and bounds are on this page for {some} checked steps, broken ones first.")
    begun = branches_begun(run.about)
    notes += [f"Settings were changed on purpose: {in_words(resume)} ({resume['time']})." for resume in begun]
    notes += events(run.records)
    specs = [*charts(run.records, run.config, parts.entropies(run)), *more_charts(run.records)]
    data: dict[str, Any] = {
        "domain": [run.records[0]["step"], run.records[-1]["step"]],
        "charts": specs,
        "marks": [{"step": resume["step"], "label": f"branch {resume['branch']}"} for resume in begun],
        "checks": checks.lines,
        "heat": heat,
        "bias": curves,
    }
    body = "\n".join(
        [
            parts.head(run),
            words.verdict(checks),
            parts.facts(run),
            parts.notes([*run.notes, *notes]),
            parts.chart_frames(specs, checks),
            parts.parity(heat, checks),
            parts.bias_frame(curves),
            parts.stages(checks),
            parts.sample(run),
            parts.config(run),
        ]
    )
    return page(f"{parts.name(run)} · Lockstep report", body, data, SCRIPTS)


def page(
    title: str, body: str, data: Mapping[str, Any], scripts: Sequence[str], styles: Sequence[str] = ("page.css",)
) -> str:
    """One HTML page that needs nothing but a browser. data: for its scripts, files of this package, in order."""
    script = f"\n{''.join(map(_asset, scripts))}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY.format(digest)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{esc(title)}</title>\n"
        f"<style>\n{''.join(map(_asset, styles))}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f'<script type="application/json" id="data">{embed(data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def write_report(run_dir: Path, out: Path | None = None, warn: Callable[[str], None] = lambda note: None) -> Path:
    """Write the report to `out`, or to `report.html` in the run directory, whole or not at all; return where.

    `warn` is told what is damaged.

    Raises:
        UserError: as `build_report`, or the file cannot be written.
    """
    path = out or run_dir / "report.html"
    write_atomically(path, [build_report(run_dir, warn).encode("utf-8")])
    return path


def _asset(name: str) -> str:
    return resources.files("lockstep.core.report").joinpath(name).read_text(encoding="utf-8")
