"""Findings of a step's single operations."""

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
    """The findings of a step's operations: all that break a bound, and for each kind the one nearest to its bound."""

    findings: Sequence[Finding]
    coverage: Coverage


@runtime_checkable
class Observer(Protocol):
    """A reference that also judges single operations, before the step updates the weights."""

    def observe(self, params: Arrays, batch: Any, precision: Precision, uncovered: Uncovered) -> Observed | None:
        """Judge operations of a step.

        Returns None if this is switched off. Raises UserError for what cannot be judged.
        """
        ...
