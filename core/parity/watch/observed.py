"""The judgement of a step's single operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lockstep.core.backend import Arrays
from lockstep.core.parity.measures.verdict import Finding
from lockstep.core.parity.watch.coverage import Coverage
from lockstep.core.parity.watch.limits import Precision
from lockstep.core.parity.watch.uncovered import Uncovered


@dataclass(frozen=True)
class Observed:
    """The findings of a step's operations: those that do not hold, and of each kind the one nearest to its bound."""

    findings: Sequence[Finding]
    coverage: Coverage


@runtime_checkable
class Observer(Protocol):
    """A reference that judges single operations as well, before the step updates the weights."""

    def observe(self, params: Arrays, batch: Any, precision: Precision, uncovered: Uncovered) -> Observed | None:
        """Judge operations of a step; None where that was not asked for. Raises UserError for what it cannot judge."""
        ...
