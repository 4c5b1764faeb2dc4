"""The settings that a sweep varies, as the command line gives them: ranges and lists."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.core.config.file import COMMAND_LINE, adapter, complaint, load_config, settings, shortened, unknown_key
from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError

# One trial's settings: dotted key → text, as the command line would give them.
Point = Mapping[str, str]

EXAMPLE = "--vary optim.peak-lr=1e-4:3e-3:log"
LEARNING_RATE = "optim.peak_lr"
# A trial's own name is the sweep's to choose.
KEPT = {"name": "trials have names of their own"}
# Digits of a value that is drawn from a range.
DIGITS = 6
# Whole numbers up to here are exact as floating-point numbers, which samplers draw.
EXACT = 2**53
_RANGE = re.compile(r"([^:,]+):([^:,]+)(?::([^:,]*))?")


@dataclass(frozen=True)
class Varied:
    """A setting that a sweep varies.

    key: dotted. text: as it was given. choices: the values of a list, as text; empty for a range. low, high: of a
    range, both included. log: whether a range is sampled evenly in the logarithm. whole: whether it holds integers.
    """

    key: str
    text: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    @property
    def is_range(self) -> bool:
        """Return whether it is a range."""
        return not self.choices

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the values that show whether a configuration can hold all: the ends of a range, or a list's values."""
        return self.choices or (self.text_of(self.low), self.text_of(self.high))

    @property
    def numbers(self) -> bool:
        """Return whether every value is a finite number."""
        return self.is_range or all(number(text) is not None for text in self.choices)

    def text_of(self, value: Any) -> str:
        """Return a value as the command line would give it; one of a range is rounded to DIGITS and stays inside."""
        if not self.is_range:
            return str(value)
        if self.whole:
            return str(int(value))
        rounded = float(f"{value:.{DIGITS}g}")
        return repr(min(max(rounded, self.low), self.high))

    def holds(self, text: str) -> bool:
        """Return whether a value, as text, is one of these."""
        if not self.is_range:
            return text in self.choices
        value = number(text)
        return value is not None and self.low <= value <= self.high and (not self.whole or value == int(value))


def number(text: str) -> float | None:
    """Return a text as a finite number, None if it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def read_space(texts: Sequence[str]) -> tuple[Varied, ...]:
    """Read every `--vary KEY=LOW:HIGH[:log]` and `--vary KEY=VALUE,VALUE…`.

    Raises UserError with a line for each that is not understood, is given twice, or holds values that no setting of
    this kind has.
    """
    if not texts:
        raise UserError(f"{COMMAND_LINE}: the search space is empty: say what to vary, as in {EXAMPLE}")
    found: list[Varied] = []
    wrong: list[str] = []
    for text in texts:
        try:
            one = _read(text)
        except UserError as error:
            wrong += error.lines
            continue
        if any(other.key == one.key for other in found):
            wrong.append(f"{COMMAND_LINE}: vary = {shortened(text)}: {one.key} is varied twice")
        found.append(one)
    if wrong:
        raise UserError(*wrong)
    return tuple(found)


def _read(text: str) -> Varied:
    name, is_given, values = text.partition("=")
    key = name.strip().removeprefix("--").replace("-", "_")
    known = settings()
    begin = f"{COMMAND_LINE}: vary = {shortened(text)}: "
    if not is_given:
        raise UserError(f"{begin}no values: KEY=LOW:HIGH, KEY=LOW:HIGH:log or KEY=VALUE,VALUE…, as in {EXAMPLE}")
    if key not in known:
        raise UserError(f"{begin}{unknown_key(key, None, known)}")
    if key in KEPT:
        raise UserError(f"{begin}{key} cannot be varied: {KEPT[key]}")
    ends = _RANGE.fullmatch(values.strip())
    try:
        return _range(key, text, *ends.groups()) if ends else _list(key, text, values)
    except _Wrong as error:
        raise UserError(f"{begin}{error}") from None


class _Wrong(ValueError):
    """A fault in the values of a setting, in words."""


def _range(key: str, text: str, low: str, high: str, scale: str | None) -> Varied:
    if scale not in (None, "log"):
        raise _Wrong(f"the scale {scale!r} is not known: leave it out, or write log")
    values = [_value(key, end.strip()) for end in (low, high)]
    for end, value in zip((low, high), values, strict=True):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _Wrong(f"{end!r} is no number, and a range has numbers; list the values with commas")
    first, last = float(values[0]), float(values[1])
    if first >= last:
        raise _Wrong(f"the low end {low} is not below the high end {high}")
    if scale and first <= 0:
        raise _Wrong(f"a logarithmic range begins above 0, and its low end is {low}")
    whole = all(isinstance(value, int) for value in values)
    if whole and any(abs(value) > EXACT for value in values):
        raise _Wrong(f"a range of whole numbers ends at {EXACT:,} (2^53) at most; list larger ones with commas")
    found = Varied(key, text, (), first, last, bool(scale), whole)
    if not whole and float(f"{first:.{DIGITS}g}") == float(f"{last:.{DIGITS}g}"):
        raise _Wrong(f"the ends {low} and {high} are equal in {DIGITS} digits, which is what a trial has")
    return found


def _list(key: str, text: str, values: str) -> Varied:
    choices = tuple(value.strip() for value in values.split(","))
    if choices == ("",):
        raise _Wrong(f"no values: the search space is empty; write them, as in {EXAMPLE}")
    if "" in choices:
        raise _Wrong("a value between two commas is empty")
    plain = [_value(key, value) for value in choices]
    if len(set(map(repr, plain))) < len(plain):
        raise _Wrong("a value stands twice")
    return Varied(key, text, choices)


def _value(key: str, text: str) -> Any:
    try:
        return adapter(settings()[key]).validate_strings(text)
    except ValidationError as error:
        raise _Wrong(complaint("", key, text, error).removeprefix(": ")) from None


def config_of(file: Path, point: Point) -> RunConfig:
    """Return the configuration of a trial. Raises UserError if a rule between settings refuses it."""
    return load_config(file, dict(point))


def in_words(point: Point) -> str:
    """Return a point in one line: `optim.peak_lr 0.001, optim.weight_decay 0.1`."""
    return ", ".join(f"{key} {text}" for key, text in point.items()) or "nothing varied"
