"""Bias over steps as curves with their bounds: the worst of each stage, those nearest to their bounds first.

The curves are those of `observations/bias.npz` (core/parity/judge/bias.py), by checks added. Their bounds follow from
the single-step bounds D and G and from the count n of independent numbers; a check's line gives the bounds of one T,
and D with them, so that G and n are solved for. Without the file, the lines' own values are drawn, one a checked step.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.errors import UserError
from lockstep.core.files.npz import read_npz
from lockstep.core.parity.evidence.sketch import K
from lockstep.core.parity.judge import bias
from lockstep.core.report.checks import Checks, RowKey
from lockstep.core.report.curves import wire

KEYS = 12  # curves that the page carries
POINTS = 160  # points of a curve
NAMES = ("bias", "gain_bias", "bias_recent", "gain_bias_recent")  # the columns of `Bias.curve`, after T

Json = dict[str, Any]
Floats = NDArray[np.float64]
# Rows of (step, then value and bound of each of `NAMES`), the lines of one comparison in their order.
Series = dict[RowKey, Floats]


def bias_curves(path: Path, checks: Checks, notes: list[str]) -> Json | None:
    """Return the page's curves, from the file at `path` where it is there and whole; None if no sums were judged.

    `left` counts comparisons that are not drawn. Each curve: stage, tap, phase, layer, strain (the last, 1 is the
    bound), `x` with its unit, and for `bias` and `gain_bias` values and bounds, of the whole run and of recent checks.
    """
    series = _series(checks)
    if not series:
        return None
    sums = _read(path, notes)
    ranked = sorted(series, key=lambda key: -_strain(series[key][-1]))
    # One of each stage and phase: what is systematic in a stage is much the same in all layers.
    of_stage: dict[tuple[str, str], RowKey] = {}
    for key in ranked:
        of_stage.setdefault((key.stage, key.phase), key)
    found = []
    for key in list(of_stage.values())[:KEYS]:
        table = _curve(sums, key, series[key], checks) if sums else None
        unit = "steps" if table is None else "checks"
        found.append(_wired(key, series[key] if table is None else table, unit, _strain(series[key][-1])))
    return {"curves": found, "left": len(ranked) - len(found)}


def _series(checks: Checks) -> Series:
    by_number = {number: key for key, number in checks.rows.items() if key.scope == "over_steps"}
    if not by_number:
        return {}
    rows: dict[tuple[int, int], Floats] = {}
    for place, name in enumerate(NAMES):
        if name not in checks.measures:
            continue
        cells = checks.measures[name]
        for cell, value, high in zip(cells.cell, cells.value, cells.high, strict=True):
            row, column = checks.cells.row[cell], checks.cells.column[cell]
            if row in by_number:
                line = rows.setdefault((row, column), np.full(1 + 2 * len(NAMES), np.nan))
                line[0] = checks.steps[column]
                line[1 + 2 * place : 3 + 2 * place] = value, high
    grouped: dict[RowKey, list[Floats]] = {}
    for (row, _), line in rows.items():
        grouped.setdefault(by_number[row], []).append(line)
    return {key: np.stack(lines) for key, lines in grouped.items()}


def _strain(line: Floats) -> float:
    """Return how near the nearest of one line's values is to its bound; infinite if one is NaN that has a bound."""
    values, highs = line[1::2], line[2::2]
    strains = [v / h if h > 0 else math.inf for v, h in zip(values, highs, strict=True) if not math.isnan(h)]
    return max((math.inf if math.isnan(s) else float(s) for s in strains), default=0.0)


def _read(path: Path, notes: list[str]) -> bias.Bias | None:
    if not path.is_file():
        return None
    try:
        return bias.Bias.from_arrays(read_npz(path))
    except (UserError, TypeError, AttributeError) as error:
        notes.append(f"{path.name} could not be read ({error}); bias is drawn from the checks themselves.")
        return None


def _curve(sums: bias.Bias, key: RowKey, series: Floats, checks: Checks) -> Floats | None:
    """Return rows of (T, value and bound of each of `NAMES`) from the file; None if it does not hold these checks."""
    name = (key.stage, key.phase, key.tap)
    distance = _distance_bound(checks, key)
    if name not in sums.keys or distance is None:
        return None
    curve = sums.curve(name)
    for line in series[::-1]:
        # A line's value is that of the sums after T checks, bit for bit: so its bounds are of that T.
        at = np.flatnonzero(curve[:, 1] == line[1])
        if len(at):
            break
    else:
        return None
    checked = float(curve[at[-1], 0])
    gain = line[4] / bias.limits(checked, distance, 1.0)[1]
    size = _independent(line[2], checked, distance)
    table = np.empty((len(curve), 1 + 2 * len(NAMES)))
    table[:, 0], table[:, 1::2] = curve[:, 0], curve[:, 1:]
    for row, count in zip(table, curve[:, 0], strict=True):
        for memory, forget in enumerate(bias.MEMORIES):
            bounds = (
                bias.limits(_effective(count, forget), distance, gain, size)
                if count >= bias.LEAST_CHECKS
                else (math.nan, math.nan)
            )
            row[2 + 4 * memory], row[4 + 4 * memory] = bounds
    return table


def _distance_bound(checks: Checks, key: RowKey) -> float | None:
    """Return D, the single-step bound of this comparison's twin distance, from its last local finding."""
    wanted = (key.stage, key.phase, key.tap, "local")
    row = next((n for k, n in checks.rows.items() if (k.stage, k.phase, k.tap, k.scope) == wanted), None)
    cells = checks.measures.get("twin_distance")
    if row is None or cells is None:
        return None
    found = [high for cell, high in zip(cells.cell, cells.high, strict=True) if checks.cells.row[cell] == row]
    return found[-1] if found and math.isfinite(found[-1]) else None


def _independent(bound: float, checked: float, distance: float) -> int:
    """Solve for n, from which `bias.limits` made this bound of B: (1 + 2y + 2y²)·D² + T·β² with y = √(x/n)."""
    systematic = min(bias.SYSTEMATIC_DISTANCE * distance, bias.SYSTEMATIC_MOST)
    scatter = (bound**2 - checked * systematic**2) / distance**2
    y = (math.sqrt(max(2 * scatter - 1, 1.0)) - 1) / 2
    return max(1, min(round(-math.log(bias.CHANCE) / y**2), K)) if y > 0 else K


def _effective(count: float, forget: float) -> float:
    """Return (Σ λᵃ)² / Σ λ²ᵃ over `count` checks."""
    if forget == 1:
        return count
    return float(((1 - forget**count) / (1 - forget)) ** 2 / ((1 - forget ** (2 * count)) / (1 - forget**2)))


def _wired(key: RowKey, table: Floats, unit: str, strain: float) -> Json:
    kept = np.unique(np.linspace(0, len(table) - 1, min(len(table), POINTS)).astype(int))

    def column(place: int) -> list[Any]:
        return [None if math.isnan(v) and place % 2 == 0 else wire(v, 4) for v in table[kept, place].tolist()]

    names = {
        name: {"value": column(1 + 2 * i), "bound": column(2 + 2 * i), "recent": column(5 + 2 * i)}
        | {"recent_bound": column(6 + 2 * i)}
        for i, name in enumerate(NAMES[:2])
    }
    place = {"stage": key.stage, "tap": key.tap, "phase": key.phase, "layer": key.layer}
    x = [int(v) for v in table[kept, 0].tolist()]
    return place | {"strain": wire(strain, 3), "unit": unit, "x": x} | names
