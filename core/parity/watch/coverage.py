"""Count the single operations of a step that were judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Coverage:
    """A count of the operations that were judged.

    now: in this check. so_far: by this check and those before it. of: that a step has, but for views, operations that
    only make tensors, and random ones. ways: what gave the truth → how many of this check. seconds: of this part alone.
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
