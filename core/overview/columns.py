"""The values that rows are sorted and filtered by: figures under short names, and settings."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.core.errors import UserError
from lockstep.core.overview.find import natural
from lockstep.core.overview.row import Row
from lockstep.core.overview.tail import is_number

# Figures by the name that `--sort` and `--where` take.
FIGURES: Mapping[str, Callable[[Row], Any]] = {
    "path": lambda row: row.path,
    "name": lambda row: row.name,
    "state": lambda row: row.state,
    "steps": lambda row: row.tail.step,
    "loss": lambda row: row.tail.loss,
    "val": lambda row: row.tail.validation[1] if row.tail.validation else None,
    "speed": lambda row: row.tail.speed,
    "verdict": lambda row: row.verdict,
    "agreed": lambda row: row.checks["agreed"],
    "disagreed": lambda row: row.checks["disagreed"],
    "branch": lambda row: row.branch,
    "created": lambda row: row.created,
    "written": lambda row: row.tail.written,
}
_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = re.compile(r"\s*([A-Za-z][\w.\-]*)\s*(<=|>=|!=|==|=|<|>)(.*)", re.DOTALL)
_EXAMPLE = "write KEY, one of = != < <= > >=, and a value, as in 'optim.peak-lr>1e-3'"


@dataclass(frozen=True)
class Condition:
    """A comparison of a row's `key` with `value` by the operator `sign`; a row without that value does not meet it."""

    key: str
    sign: str
    value: str

    def met(self, row: Row) -> bool:
        """Return whether the row meets it. Raises UserError if the sign orders numbers and the row has none."""
        own = value_of(row, self.key)
        if own is None:
            return False
        number = _number(self.value)
        if is_number(own) and number is not None:
            return _OPERATORS[self.sign](float(own), number)
        if self.sign not in ("=", "!="):
            raise UserError(f"command line: where = {self.key}{self.sign}{self.value}: {self.sign} compares numbers")
        return _OPERATORS[self.sign](as_text(own), self.value)


def condition(text: str) -> Condition:
    """Return the condition that a text stands for; nothing in it is evaluated. Raises UserError if it is none."""
    found = _CONDITION.fullmatch(text)
    if not found:
        raise UserError(f"command line: where = {text!r}: {_EXAMPLE}")
    key, sign, value = found[1], found[2].replace("==", "="), found[3].strip()
    return Condition(key.replace("-", "_"), sign, value)


def chosen(rows: Sequence[Row], conditions: Sequence[Condition]) -> list[Row]:
    """Return the rows that meet every condition. Raises UserError if no row knows a key."""
    for each in conditions:
        require_known(each.key, rows, "where")
    return [row for row in rows if all(each.met(row) for each in conditions)]


def in_order(rows: Sequence[Row], key: str, descending: bool) -> list[Row]:
    """Return the rows sorted by a figure or a setting; those without a value, or with NaN, stand last.

    Raises UserError if no row knows the key.
    """
    key = key.replace("-", "_")
    require_known(key, rows, "sort")
    has = [row for row in rows if not _is_nothing(value_of(row, key))]
    rest = [row for row in rows if _is_nothing(value_of(row, key))]
    return sorted(has, key=lambda row: _order(value_of(row, key)), reverse=descending) + rest


def require_known(key: str, rows: Sequence[Row], option: str) -> None:
    """Raise UserError unless `key` is a figure, or a setting of one of the rows; all is known where there is no row."""
    known = [*FIGURES, *dict.fromkeys(setting for row in rows for setting in row.settings)]
    if rows and key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = (
            f"; did you mean {near[0]}?" if near else f": the figures are {', '.join(FIGURES)}; the rest are settings"
        )
        raise UserError(f"command line: {option} = {key}: neither a figure nor a setting of a run here{hint}")


def value_of(row: Row, key: str) -> Any:
    """Return a figure or a setting of a row, None if it has none."""
    return FIGURES[key](row) if key in FIGURES else row.settings.get(key)


def as_text(value: Any) -> str:
    """Return a setting as a run file writes it, without quotation marks."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value)


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return None if math.isnan(found) else found


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _order(value: Any) -> tuple[int, float, list[tuple[int, int, str]]]:
    return (0, float(value), []) if is_number(value) else (1, 0.0, natural(as_text(value)))
