"""Rows as one HTML page that needs nothing but a browser: sorted and filtered there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from lockstep.core.overview.columns import as_text
from lockstep.core.overview.row import STATES, Row
from lockstep.core.overview.table import loss_text, remarks
from lockstep.core.report.build import page
from lockstep.core.report.text import count, esc, plural

SCRIPTS, STYLES = ("runs.js",), ("page.css", "runs.css")
# Settings that have a column from the beginning; a button shows the others.
SHOWN = 8
_FIGURES = ("run", "state", "steps", "loss", "val", "tokens/s", "checks", "last record (UTC)")
_RIGHT = ("steps", "loss", "val", "tokens/s")


def build_page(folder: Path, rows: Sequence[Row], keys: Sequence[str], baseline: Row | None) -> str:
    """Return the page. keys: the settings that differ, each a column. baseline: the run to compare others with."""
    where = str(folder.resolve())
    beside = f"Settings that are not those of {baseline.path} are bold." if baseline else ""
    body = "\n".join(
        [
            f'<header class="head"><p class="eyebrow">Lockstep runs</p><h1>{esc(folder.resolve().name or where)}</h1>'
            f'<p class="hint">{esc(where)}, read {datetime.now(UTC):%Y-%m-%d %H:%M} UTC</p></header>',
            _tiles(rows),
            _controls(rows, keys, beside),
            f'<div class="scroll"><table id="runs"><thead><tr>{_heads(keys)}</tr></thead>'
            f"<tbody>{''.join(_line(row, keys, baseline) for row in rows)}</tbody></table></div>",
            f'<p id="none" class="hint"{" hidden" if rows else ""}>No run is shown.</p>',
        ]
    )
    return page(f"{folder.resolve().name} · Lockstep runs", body, {}, SCRIPTS, STYLES)


def _tiles(rows: Sequence[Row]) -> str:
    states = Counter(row.state for row in rows)
    bad = sum(row.verdict == "disagreed" for row in rows)
    # A run whose check disagreed wins nothing, as in a sweep.
    may_win = [row for row in rows if row.verdict != "disagreed" and _finite(_validation(row))]
    best = min(may_win, key=lambda row: _validation(row) or 0.0, default=None)
    tiles = [("Runs", f"{len(rows):,}", "")]
    tiles += [(state.capitalize(), f"{states[state]:,}", "") for state in STATES if states[state]]
    tiles += [("Checks disagreed in", f"{bad:,}", "")] if any(row.checks for row in rows) else []
    tiles += [("Lowest val", loss_text(_validation(best)), best.path)] if best else []
    boxes = "".join(
        f'<div class="tile"><dt>{esc(label)}</dt><dd>{esc(value)}<small>{esc(beside)}</small></dd></div>'
        for label, value, beside in tiles
    )
    return f'<dl class="tiles runs-tiles">{boxes}</dl>'


def _controls(rows: Sequence[Row], keys: Sequence[str], beside: str) -> str:
    states = [state for state in STATES if any(row.state == state for row in rows)]
    buttons = "".join(
        f'<button type="button" data-state="{state}" aria-pressed="false">{state}</button>' for state in states
    )
    hidden = len(keys) - SHOWN
    more = f'<button type="button" id="more" aria-pressed="false">{plural(hidden, "more setting")}</button>'
    return (
        '<section aria-labelledby="all"><div class="title"><h2 id="all">All runs</h2>'
        '<p class="hint">Loss: mean of the last 20 steps; tokens/s: their median; val: the last validation loss; in '
        f"nats. Checks: ✓ agreed, ✕ disagreed, ? could not tell or skipped. {esc(beside)}</p></div>"
        '<div class="controls"><input id="find" type="search" placeholder="words in a row" aria-label="Words in a row">'
        f'<span class="toggles">{buttons if len(states) > 1 else ""}</span>'
        f'<span class="toggles">{more if hidden > 0 else ""}</span></div></section>'
    )


def _heads(keys: Sequence[str]) -> str:
    figures = "".join(_head(name, "n" if name in _RIGHT else "") for name in _FIGURES)
    return figures + "".join(_head(key, f"n{' more' if place >= SHOWN else ''}") for place, key in enumerate(keys))


def _head(name: str, tone: str) -> str:
    return f'<th scope="col" class="{tone}"><button type="button">{esc(name)}</button></th>'


def _line(row: Row, keys: Sequence[str], baseline: Row | None) -> str:
    tail = row.tail
    name = [row.name] if row.name and row.name != Path(row.path).name else []
    said = "".join(f"<small>{esc(text)}</small>" for text in (*name, *remarks(row)))
    planned = f"<small>of {row.planned:,}</small>" if row.planned is not None and row.planned != tail.step else ""
    validation = f"<small>step {tail.validation[0]:,}</small>" if tail.validation else ""
    written = _time(tail.written)
    return (
        f'<tr data-state="{row.state}"><th scope="row" data-v="{esc(row.path)}">{esc(row.path)}{said}</th>'
        f'<td data-v="{row.state}"><span class="state {row.state.replace(" ", "-")}">{row.state}</span></td>'
        f"{_number_cell(tail.step, '–' if tail.step is None else f'{tail.step:,}', planned)}"
        f"{_number_cell(tail.loss, loss_text(tail.loss))}"
        f"{_number_cell(_validation(row), loss_text(_validation(row)), validation)}"
        f"{_number_cell(tail.speed, '–' if tail.speed is None else count(tail.speed))}"
        f'<td class="checks" data-v="{_rank(row.checks)}">{_verdicts(row.checks)}</td>'
        f'<td data-v="{"" if tail.written is None else tail.written}">{written}</td>'
        + "".join(_setting(row, key, place >= SHOWN, baseline) for place, key in enumerate(keys))
        + "</tr>"
    )


def _number_cell(value: float | None, text: str, beside: str = "") -> str:
    return f'<td class="n" data-v="{"" if value is None else value}">{esc(text)}{beside}</td>'


def _setting(row: Row, key: str, more: bool, baseline: Row | None) -> str:
    known = key in row.settings
    text = as_text(row.settings[key]) if known else ""
    same = baseline is not None and as_text(baseline.settings.get(key)) == text
    tone = " ".join(
        name for name, holds in (("n", True), ("text", len(text) > 24), ("more", more), ("same", same)) if holds
    )
    shown = esc(text or "empty") if known else "–"
    bold = baseline is not None and known and not same
    return f'<td class="{tone}" data-v="{esc(text)}">{f"<b>{shown}</b>" if bold else shown}</td>'


def _verdicts(checks: Counter[str]) -> str:
    rest = checks.total() - checks["agreed"] - checks["disagreed"]
    parts = (("good", checks["agreed"], "✓", "agreed"), ("bad", checks["disagreed"], "✕", "disagreed"))
    found = [*parts, ("skip", rest, "?", "could not tell or skipped")]
    shown = [f'<span class="{tone}" title="{said}">{n:,} {mark}</span>' for tone, n, mark, said in found if n]
    return "".join(shown) or "–"


def _rank(checks: Counter[str]) -> str:
    """Return what the column is sorted by: disagreed checks, then the share without a verdict; empty without checks."""
    if not checks:
        return ""
    rest = checks.total() - checks["agreed"] - checks["disagreed"]
    return f"{checks['disagreed'] + rest / (checks.total() + 1):.6g}"


def _validation(row: Row) -> float | None:
    return row.tail.validation[1] if row.tail.validation else None


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _time(written: float | None) -> str:
    try:
        return "–" if written is None else f"{datetime.fromtimestamp(written, UTC):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        return "–"
