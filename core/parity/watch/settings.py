"""Settings of `watch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.core.errors import UserError
from lockstep.core.parity.measures.verdict import Check
from lockstep.core.parity.watch.library_rules import RULES
from lockstep.core.parity.watch.limits import Precision
from lockstep.core.parity.watch.snapshot import Names
from lockstep.core.parity.watch.update_rules import Rule

OnAlarm = Literal["log", "stop"] | Callable[[Check], None]
Declared = Mapping[str, Any] | Callable[[str, int], Mapping[str, Any]]


@dataclass(frozen=True)
class Settings:
    """Keyword arguments of `watch`. Raises UserError for invalid ones."""

    every: int
    precision: Precision | None
    names: Names
    clip_norm: float | None
    declared: Declared | None
    rule: str | Rule | None
    bounds: Mapping[str, float] | None
    calibrate: int
    on_alarm: OnAlarm
    start: int
    weights_change: bool

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UserError(f"every={self.every}: a number of steps, 1 or more")
        if self.precision not in (None, "fp32", "bf16", "fp64"):
            raise UserError(f"precision={self.precision!r}: it is fp32, bf16 or fp64")
        if isinstance(self.rule, str) and self.rule not in RULES:
            raise UserError(f"rule={self.rule!r}: known are {', '.join(RULES)}, or give a function")
        if not callable(self.on_alarm) and self.on_alarm not in ("log", "stop"):
            raise UserError(f"on_alarm={self.on_alarm!r}: it is 'log', 'stop' or a function of the check")
        if self.calibrate and self.bounds:
            raise UserError("bounds= and calibrate= both set the bounds: give one of them")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"clip_norm={self.clip_norm}: it is positive, or None where nothing is clipped")
