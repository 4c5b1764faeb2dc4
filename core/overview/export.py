"""Rows as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from lockstep.core.overview.row import Row

SCHEMA = 1


def json_of(rows: Sequence[Row], keys: Sequence[str]) -> dict[str, Any]:
    """Return what `--json` promises. keys: the settings that differ. Numbers that are not finite are texts."""
    return {"schema": SCHEMA, "differs": list(keys), "runs": [_row(row) for row in rows]}


def _row(row: Row) -> dict[str, Any]:
    tail = row.tail
    return {
        "path": _text(row.path),
        "name": _text(row.name),
        "state": row.state,
        "why": _text(row.why),
        "created": _text(row.created),
        "written": None if tail.written is None else datetime.fromtimestamp(tail.written, UTC).isoformat(),
        "steps": tail.step,
        "planned_steps": row.planned,
        "loss": _number(tail.loss),
        "validation_loss": _number(tail.validation[1]) if tail.validation else None,
        "validation_step": tail.validation[0] if tail.validation else None,
        "tokens_per_second": _number(tail.speed),
        "verdict": row.verdict,
        "checks": dict(row.checks),
        "branch": row.branch,
        "history": [_text(line) for line in row.history],
        "left": list(row.left),
        "settings": {_text(key): _plain(value) for key, value in row.settings.items()},
        "problems": [_text(problem) for problem in row.problems],
    }


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return _number(value)
    return value if isinstance(value, bool | int | None) else _text(value)


def _text(value: Any) -> str:
    """Replace lone surrogates in a text: a file name that is not UTF-8 has them."""
    return str(value).encode("utf-8", "backslashreplace").decode()
