"""The heatmap's cells in a few bytes each, for the page's script to unpack.

Rows x columns are laid out as planes of bytes, one after another, deflated and written in base64. A number
is three planes: its exponent (0 absent, 1 NaN, 2 +inf, 3 -inf, 4 zero, else the decimal exponent +
`EXPONENT_ZERO`) and a signed mantissa of `digits` decimal digits, + 32768, as low and high byte. So a number
keeps its leading decimal digits, and planes that hardly change along a row (exponents, bounds, sizes) deflate
to almost nothing.

Planes, in order: state (0 absent, 1 ok, 2 broken); meta, low and high (index into `metas`); unequal (a
number); then for each measure a number, and its bound as 2 * index into `bounds` + 1 if broken, low and high.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.report.checks import Checks, RowKey
from core.report.curves import wire

EXPONENT_ZERO = 132
FINE_VALUES = 250_000  # up to this many values carry four digits, more carry three
MAX_VALUES = 650_000  # beyond, columns are left out, agreeing ones first
METAS = 65_536  # two bytes' worth
UNEQUAL_DIGITS = 2
PHASES = ("data", "state", "forward", "backward", "update")

Bytes = NDArray[np.uint8]


def encode(checks: Checks) -> dict[str, Any] | None:
    """The heatmap for the page's JSON, or None if nothing was compared; `left_out` columns are not in it."""
    if not checks.steps:
        return None
    labels, rows = _sections(checks.order)
    columns = _columns(checks)
    width, size = len(columns), len(rows) * len(columns)
    row_place, column_place = np.full(len(rows), -1), np.full(len(checks.steps), -1)
    row_place[[checks.rows[key] for _, key in rows]] = np.arange(len(rows))
    column_place[columns] = np.arange(width)
    column = column_place[_ints(checks.cells.column)]
    cell = np.where(column >= 0, row_place[_ints(checks.cells.row)] * width + column, -1)

    def scatter(at: NDArray[np.int64], values: NDArray[Any], fill: float = 0) -> NDArray[Any]:
        plane = np.full(size, fill, dtype=values.dtype)
        plane[at[at >= 0]] = values[at >= 0]
        return plane

    digits = 4 if _values(checks) <= FINE_VALUES else 3
    planes = [scatter(cell, _ints(checks.cells.broken) + 1).astype(np.uint8)]
    planes += _two_bytes(scatter(cell, np.minimum(_ints(checks.cells.meta), METAS - 1)))
    unequal = scatter(cell, np.asarray(checks.cells.unequal, dtype=np.float64), -1.0)
    planes += number_planes(unequal, unequal >= 0, UNEQUAL_DIGITS)
    for measure in checks.measures.values():
        at = cell[_ints(measure.cell)]
        values = scatter(at, np.asarray(measure.value, dtype=np.float64))
        planes += number_planes(values, scatter(at, np.ones(len(at), dtype=bool)), digits)
        planes += _two_bytes(scatter(at, 2 * _ints(measure.bound) + _ints(measure.broken)))
    return {
        "digits": digits,
        "unequal_digits": UNEQUAL_DIGITS,
        "zero": EXPONENT_ZERO,
        "steps": [checks.steps[i] for i in columns],
        "left_out": len(checks.steps) - width,
        "sections": labels,
        "rows": [[label, k.stage, k.tap, k.phase, k.layer, k.scope] for label, k in rows],
        "measures": list(checks.measures),
        "metas": [list(meta) for meta in list(checks.metas)[:METAS]],
        "bounds": [[wire(low), wire(high), basis] for low, high, basis in checks.bounds],
        "bases": list(checks.bases),
        "cells": base64.b64encode(zlib.compress(np.concatenate(planes).tobytes(), 9)).decode(),
    }


def number_planes(values: NDArray[np.float64], present: NDArray[np.bool_], digits: int) -> list[Bytes]:
    """Exponent, low and high mantissa bytes of `values`, rounded to `digits` decimal digits (at most 4)."""
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


def _sections(order: Sequence[RowKey]) -> tuple[list[str], list[tuple[int, RowKey]]]:
    """Section labels, and the rows in the order of the chain with the number of their section."""
    scopes: dict[str, set[str]] = {}
    for key in order:
        scopes.setdefault(key.phase, set()).add(key.scope)

    def rank(key: RowKey) -> tuple[int, int]:
        phase = PHASES.index(key.phase) if key.phase in PHASES else len(PHASES)
        return phase, int(key.scope != "local")

    labels: list[str] = []
    rows = []
    for key in sorted(order, key=rank):
        split = key.phase == "forward" or len(scopes[key.phase]) > 1
        label = f"{key.phase}, {key.scope.replace('_', ' ')}" if split else key.phase
        if label not in labels:
            labels.append(label)
        rows.append((labels.index(label), key))
    return labels, rows


def _columns(checks: Checks) -> list[int]:
    """Columns by step; if there are too many cells, broken ones and an even choice of the others."""
    by_step = sorted(range(len(checks.steps)), key=lambda i: checks.steps[i])
    values = _values(checks)
    if values <= MAX_VALUES:
        return by_step
    room = max(1, len(by_step) * MAX_VALUES // values)
    bad = {c for c, broken in zip(checks.cells.column, checks.cells.broken, strict=True) if broken}
    first = [i for i in by_step if i in bad]
    chosen = _even(first, room)
    chosen += _even([i for i in by_step if i not in bad], room - len(chosen))
    return [i for i in by_step if i in set(chosen)]


def _even(items: list[int], count: int) -> list[int]:
    """`count` of the items, the first always among them, evenly spread."""
    if count >= len(items):
        return items
    return [items[i * len(items) // count] for i in range(count)]


def _values(checks: Checks) -> int:
    return sum(len(measure.value) for measure in checks.measures.values())


def _two_bytes(values: NDArray[np.int64]) -> list[Bytes]:
    return [(values & 255).astype(np.uint8), (values >> 8).astype(np.uint8)]


def _ints(values: Sequence[int]) -> NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64)
