"""Count the operations of a step that were judged one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Coverage:
    """Counts of the judged operations.

    now: operations judged in this check.
    so_far: operations judged in this check or an earlier one.
    of: operations of a step, without views, random operations, and operations that only create tensors.
    ways: source of the truth → number of operations of this check that were judged by it.
    seconds: wall time of this part of the check.
    """

    now: int
    so_far: int
    of: int
    ways: Mapping[str, int]
    seconds: float

    def __str__(self) -> str:
        return f"operations: {self.so_far} of {self.of} judged"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready mapping."""
        return asdict(self)
