"""The cells of the stage x layer x step heatmap in a few bytes each, for the page's script to unpack.

A *row* is one comparison (stage, tap, phase, layer, scope), a *line* of the map is a stage in one phase, a column is a
checked step. Rows x columns are laid out as planes of bytes, one after another, deflated and written in base64:

* `cells`: state (core/report/checks.py: absent, held, contaminated, origin, the origin named), then strain, one byte
  on a logarithmic scale. All checks, up to `MAX_CELLS` comparisons.
* `details`, of the columns in `detailed`: meta, low and high byte (index into `metas`); the share of unequal bits (a
  number); then for each measure value, high and low bound (numbers), and 2 * index into `bases` + 1 if broken, low
  and high byte.

A number is three planes: its exponent (0 absent, 1 NaN, 2 +inf, 3 -inf, 4 zero, 5 minus and 6 one over the high bound,
else the decimal exponent + `EXPONENT_ZERO`) and a signed mantissa of `digits` decimal digits, + 32768, as low and high
byte. So a number keeps its leading decimal digits, and planes that hardly change along a row deflate to almost nothing.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.parity.reference.stages import is_forward, place
from lockstep.core.report.checks import AT_BOUND, HELD, PER_DECADE, Checks, MeasureCells, RowKey

EXPONENT_ZERO = 132
MINUS_HIGH, ONE_OVER_HIGH = 5, 6
FINE_VALUES = 250_000  # up to this many values carry four digits, more carry three
MAX_VALUES = 400_000  # beyond, only some columns carry values: broken ones first
MAX_CELLS = 1_200_000  # beyond, columns are left out, broken ones last
METAS = 65_536  # two bytes' worth
UNEQUAL_DIGITS = 2
BOUND_DIGITS = 3
# Groups of lines by the first number of `place`; those after the backward pass are distinguished by their phase.
GROUPS = {0: "data and weights", 1: "forward", 2: "backward"}
AFTER = {"backward": "gradients", "update": "update", "state": "checkpoint", "forward": "evaluation and sampling"}
UNKNOWN = 9  # stages that this version does not know come last

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]


def encode(checks: Checks) -> dict[str, Any] | None:
    """Encode the heatmap for the page's JSON; None if nothing was compared; `left_out` columns are not in it."""
    if not checks.steps:
        return None
    keys, lines, line_of = _lines(checks.rows)
    depths, depth_of = _depths(keys)
    columns = _columns(checks, range(len(checks.steps)), len(checks.cells.row), MAX_CELLS)
    detailed = _columns(checks, columns, _values(checks), MAX_VALUES)
    place_of = {c: i for i, c in enumerate(columns)}
    return {
        "steps": [checks.steps[c] for c in columns],
        "left_out": len(checks.steps) - len(columns),
        "detailed": [place_of[c] for c in detailed],
        "lines": lines,
        "rows": [[line, k.tap, k.layer, k.scope, d] for k, line, d in zip(keys, line_of, depth_of, strict=True)],
        "depths": depths,
        "measures": list(checks.measures),
        "metas": [list(meta) for meta in list(checks.metas)[:METAS]],
        "bases": list(checks.bases),
        "digits": _digits(checks),
        "bound_digits": BOUND_DIGITS,
        "unequal_digits": UNEQUAL_DIGITS,
        "zero": EXPONENT_ZERO,
        "at_bound": AT_BOUND,
        "per_decade": PER_DECADE,
        "cells": _pack(_map_planes(checks, _Grid(checks, keys, columns))),
        "details": _pack(_detail_planes(checks, _Grid(checks, keys, detailed))),
    }


class _Grid:
    """The map from each cell of `Checks` to planes of these rows and columns."""

    def __init__(self, checks: Checks, keys: Sequence[RowKey], columns: Sequence[int]) -> None:
        self.size = len(keys) * len(columns)
        row_place, column_place = np.full(len(keys), -1), np.full(len(checks.steps), -1)
        row_place[[checks.rows[key] for key in keys]] = np.arange(len(keys))
        column_place[np.asarray(columns)] = np.arange(len(columns))
        column = column_place[_ints(checks.cells.column)]
        self.at = np.where(column >= 0, row_place[_ints(checks.cells.row)] * len(columns) + column, -1)

    def plane(self, values: NDArray[Any], fill: float = 0, of: NDArray[np.int64] | None = None) -> NDArray[Any]:
        """Return the plane of `values`, one a cell, or one for each cell in `of`."""
        at = self.at if of is None else self.at[of]
        plane = np.full(self.size, fill, dtype=values.dtype)
        plane[at[at >= 0]] = values[at >= 0]
        return plane


def _map_planes(checks: Checks, grid: _Grid) -> list[Bytes]:
    return [grid.plane(np.asarray(values, dtype=np.uint8)) for values in (checks.cells.state, checks.cells.strain)]


def _detail_planes(checks: Checks, grid: _Grid) -> list[Bytes]:
    planes = _two_bytes(grid.plane(np.minimum(_ints(checks.cells.meta), METAS - 1)))
    unequal = grid.plane(np.asarray(checks.cells.unequal, dtype=np.float64), -1.0)
    planes += number_planes(unequal, unequal >= 0, UNEQUAL_DIGITS)
    for measure in checks.measures.values():
        planes += _measure_planes(measure, grid, _digits(checks))
    return planes


def _measure_planes(measure: MeasureCells, grid: _Grid, digits: int) -> list[Bytes]:
    of = _ints(measure.cell)
    value, low, high = (
        grid.plane(np.asarray(x, dtype=np.float64), np.nan, of) for x in (measure.value, measure.low, measure.high)
    )
    present = grid.plane(np.ones(len(of), dtype=bool), 0, of)
    lows = number_planes(low, ~np.isnan(low), BOUND_DIGITS)
    with np.errstate(invalid="ignore"):
        for code, like in ((MINUS_HIGH, low == -high), (ONE_OVER_HIGH, np.abs(low * high - 1) < 1e-9)):
            lows[0][like] = code
            lows[1][like] = lows[2][like] = 0
    return [
        *number_planes(value, present, digits),
        *number_planes(high, ~np.isnan(high), BOUND_DIGITS),
        *lows,
        *_two_bytes(grid.plane(2 * _ints(measure.basis) + _ints(measure.broken), 0, of)),
    ]


def number_planes(values: Floats, present: NDArray[np.bool_], digits: int) -> list[Bytes]:
    """Return the exponent, low and high mantissa bytes of `values`, rounded to `digits` decimal digits (at most 4)."""
    plain = present & np.isfinite(values) & (np.abs(values) > 1e-120) & (np.abs(values) < 1e120)
    safe = np.where(plain, values, 1.0)
    exponent = np.floor(np.log10(np.abs(safe))).astype(np.int64)
    mantissa = np.rint(safe / 10.0 ** (exponent - digits + 1)).astype(np.int64)
    over = np.abs(mantissa) >= 10**digits
    mantissa, exponent = np.where(over, mantissa // 10, mantissa), exponent + over
    code = np.select(
        [~present, np.isnan(values), values >= 1e120, values <= -1e120, ~plain],
        [0, 1, 2, 3, 4],
        exponent + EXPONENT_ZERO,
    )
    return [code.astype(np.uint8), *_two_bytes(np.where(plain, mantissa, 0) + 32768)]


def chain(stage: str, phase: str, layer: int | None) -> tuple[int, int, int]:
    """Return `place`, with stages that this version does not know at the end."""
    try:
        return place(stage, phase, layer)
    except KeyError:
        return UNKNOWN, 0, 0


def _lines(rows: dict[RowKey, int]) -> tuple[list[RowKey], list[list[str]], list[int]]:
    """Return rows in the order of the chain, lines [group, phase, stage] in that order, and the line of each row."""
    in_blocks = {(key.phase, key.stage) for key in rows if key.layer is not None}

    def rank(line: tuple[str, str]) -> tuple[int, int, int]:
        phase, stage = line
        return chain(stage, phase, 0 if line in in_blocks and is_forward(stage) else None)

    order = sorted(dict.fromkeys((key.phase, key.stage) for key in rows), key=rank)
    number = {line: i for i, line in enumerate(order)}
    keys = sorted(rows, key=lambda k: (number[k.phase, k.stage], -1 if k.layer is None else k.layer))
    lines = [[GROUPS.get(rank((p, s))[0]) or AFTER.get(p, p), p, s] for p, s in order]
    return keys, lines, [number[key.phase, key.stage] for key in keys]


def _depths(keys: Sequence[RowKey]) -> tuple[list[list[Any]], list[int]]:
    """Return links of the forward chain as [layer, stage], first to last, and each row's place among them, or -1."""
    links = {(k.stage, k.layer) for k in keys if is_forward(k.stage) and k.phase in ("forward", "backward")}
    order = sorted(links, key=lambda link: place(link[0], "forward", link[1]))
    number = {link: i for i, link in enumerate(order)}
    of = [number.get((k.stage, k.layer), -1) if k.phase in ("forward", "backward") else -1 for k in keys]
    return [[layer, stage] for stage, layer in order], of


def _columns(checks: Checks, columns: Sequence[int], cost: int, limit: int) -> list[int]:
    """Return these columns by step; over the limit, the broken ones and an even choice of the others."""
    by_step = sorted(columns, key=lambda i: checks.steps[i])
    cost = cost * len(by_step) // len(checks.steps)
    if cost <= limit:
        return by_step
    room = max(1, len(by_step) * limit // cost)
    broken = _ints(checks.cells.column)[_ints(checks.cells.state) > HELD]
    bad = set(broken.tolist())
    chosen = _even([i for i in by_step if i in bad], room)
    chosen += _even([i for i in by_step if i not in bad], room - len(chosen))
    return [i for i in by_step if i in set(chosen)]


def _even(items: list[int], count: int) -> list[int]:
    """Choose `count` of the items, evenly spread, always with the first."""
    if count >= len(items):
        return items
    return [items[i * len(items) // count] for i in range(count)]


def _digits(checks: Checks) -> int:
    return 4 if _values(checks) <= FINE_VALUES else 3


def _values(checks: Checks) -> int:
    return sum(len(measure.value) for measure in checks.measures.values())


def _pack(planes: list[Bytes]) -> str:
    return base64.b64encode(zlib.compress(np.concatenate(planes).tobytes(), 9)).decode()


def _two_bytes(values: NDArray[np.int64]) -> list[Bytes]:
    return [(values & 255).astype(np.uint8), (values >> 8).astype(np.uint8)]


def _ints(values: Sequence[int]) -> NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64)
