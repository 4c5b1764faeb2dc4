"""A run directory's report: one HTML file that needs only a browser."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from lockstep.core.files.atomic import write_atomically
from lockstep.core.report import parts, words
from lockstep.core.report.bias_curves import bias_curves
from lockstep.core.report.checks import Checks, read_checks
from lockstep.core.report.curves import charts
from lockstep.core.report.heatmap import encode
from lockstep.core.report.read import Run, read_run
from lockstep.core.report.seeing import events, more_charts
from lockstep.core.report.text import embed, esc
from lockstep.core.run.history import branches_begun, in_words

# One script, in this order: each file speaks of what stands before it.
SCRIPTS = ("page.js", "cells.js", "map.js", "depth.js", "bias.js", "links.js")
# The page may load nothing and run nothing but its own script: what it shows is in it, and names in it are anybody's.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{}'; base-uri 'none'; form-action 'none'"


def build_report(run_dir: Path, warn: Callable[[str], None] = lambda note: None) -> str:
    """Build the report on a run directory as HTML.

    Damaged or torn parts are left out, noted on the page, and passed to `warn`.

    Raises:
        UserError: there is no complete record, or an intact line of records.jsonl or parity.jsonl cannot be
            understood.
    """
    run = read_run(run_dir)
    notes: list[str] = []
    checks = read_checks(run_dir / "parity.jsonl", run.about, notes)
    found = contents(run, checks, notes, warn)
    return page(found.title, "\n".join(found.parts.values()), found.data, SCRIPTS)


@dataclass(frozen=True)
class Contents:
    """A report before it is a page. parts: HTML by name, in order. data: for the page's scripts."""

    title: str
    parts: Mapping[str, str]
    data: Mapping[str, Any]


def contents(run: Run, checks: Checks, notes: list[str], warn: Callable[[str], None] = lambda note: None) -> Contents:
    """Return what the report on a run and its checks holds.

    notes: on the files of the checks; more is added to them. `warn` is called with a line for each damage.
    """
    heat = encode(checks)
    curves = bias_curves(run.path / "observations" / "bias.npz", checks, notes)
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
    found = {
        "head": parts.head(run),
        "verdict": words.verdict(checks),
        "facts": parts.facts(run),
        "notes": parts.notes([*run.notes, *notes]),
        "charts": parts.chart_frames(specs, checks),
        "parity": parts.parity(heat, checks),
        "bias": parts.bias_frame(curves),
        "stages": parts.stages(checks),
        "sample": parts.sample(run),
        "config": parts.config(run),
    }
    return Contents(f"{parts.name(run)} · Lockstep report", found, data)


def page(
    title: str, body: str, data: Mapping[str, Any], scripts: Sequence[str], styles: Sequence[str] = ("page.css",)
) -> str:
    """Return one HTML page that needs only a browser. data: for its scripts, files of this package, in order."""
    return page_of(title, body, data, "".join(map(asset, scripts)), styles)


def page_of(
    title: str, body: str, data: Mapping[str, Any], code: str, styles: Sequence[str], policy: str = POLICY
) -> str:
    """Return a page with this code as its only script. policy: with a place for the script's hash."""
    script = f"\n{code}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy.format(digest_of(script))}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{esc(title)}</title>\n"
        f"<style>\n{''.join(map(asset, styles))}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f'<script type="application/json" id="data">{embed(data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def write_report(run_dir: Path, out: Path | None = None, warn: Callable[[str], None] = lambda note: None) -> Path:
    """Write the report to `out`, or to `report.html` in the run directory, whole or not at all; return where.

    `warn` is called with each damaged part.

    Raises:
        UserError: as `build_report`, or the file cannot be written.
    """
    path = out or run_dir / "report.html"
    write_atomically(path, [build_report(run_dir, warn).encode("utf-8")])
    return path


def digest_of(script: str) -> str:
    """Return the SHA-256 of a script's text as a policy writes it."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def asset(name: str) -> str:
    """Return the text of a style sheet or a script of this package."""
    return resources.files("lockstep.core.report").joinpath(name).read_text(encoding="utf-8")
