"""Rows: the outcome of each mutant, and the score over all mutants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from lockstep.core.mutate.mutant import Mutant
from lockstep.core.mutate.places import Origin

# Relative changes of the gradients, or of the update, that part mutants into classes: large, small and less.
LARGE, SMALL = 1e-2, 1e-3


@dataclass(frozen=True)
class Row:
    """A mutant under a recipe, and its result.

    expected: the correct origins, the preferred one first. step: the first step in which it can act.
    gradients, worst, loss, update: relative changes that it makes to the real step, whose loss weights are the run's
    own: in L2 over all parameters, in the parameter that changes most, in the loss, and in the weights after the step
    (in updates).
    effect: the change that determines its class. equivalent: it changes no bit of that step. stopped: that step is not
    finite, so that the trainer ends by itself.
    found: the check of `step` disagreed. named: its origin. others: all origins, in the chain's order.
    scope, measure: of the origin. error: why there is no verdict.
    """

    id: str
    recipe: str
    expected: tuple[Origin, ...]
    step: int
    equivalent: bool = False
    stopped: bool = False
    gradients: float = 0.0
    worst: float = 0.0
    loss: float = 0.0
    update: float = 0.0
    effect: float = 0.0
    found: bool = False
    named: Origin | None = None
    exact: bool = False
    others: tuple[Origin, ...] = ()
    scope: str = ""
    measure: str = ""
    seconds: float = 0.0
    error: str = ""

    @cached_property
    def mutant(self) -> Mutant:
        """Return the mutant of the id."""
        return Mutant.parse(self.id)

    @property
    def acts(self) -> bool:
        """Return whether it changes a bit of a step that is made, and has a verdict."""
        return not (self.error or self.equivalent or self.stopped)

    @property
    def large(self) -> bool:
        """Return whether it moves the real step by more than LARGE."""
        return self.acts and not self.effect <= LARGE

    @property
    def small(self) -> bool:
        """Return whether it moves the real step by more than SMALL, and not by more than LARGE."""
        return self.acts and SMALL < self.effect <= LARGE

    @property
    def survives(self) -> bool:
        """Return whether a mutant that moves the step by more than LARGE was not found."""
        return self.large and not self.found

    def to_json(self) -> dict[str, Any]:
        """Return a mapping for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Row:
        """Return the row from a mapping made by `to_json`."""
        kept = {key: row[key] for key in cls.__dataclass_fields__ if key in row}
        for key in ("expected", "others"):
            kept[key] = tuple(tuple(one) for one in kept[key])
        kept["named"] = tuple(kept["named"]) if kept["named"] else None
        return cls(**kept)


@dataclass(frozen=True)
class Share:
    """A count out of a total."""

    count: int
    of: int

    def __str__(self) -> str:
        return f"{self.count} of {self.of}" + (f" ({self.count / self.of:.1%})" if self.of else "")


@dataclass(frozen=True)
class Score:
    """The score over rows.

    large, small, less: the mutants of each class that were found; less: those that move the step by up to SMALL.
    update: those that move the gradients by up to LARGE, and the update that follows from them by more.
    named: of the large ones that were found, those that were named exactly. validation: those of validation's scores,
    which move no step. equivalent: mutants that change no bit. stopped: those that end the trainer. errors: those
    without a verdict.
    """

    mutants: int
    equivalent: int
    stopped: int
    errors: int
    large: Share
    named: Share
    small: Share
    less: Share
    update: Share
    validation: Share

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Score:
        """Return the score of these rows."""
        acting = [row for row in rows if row.acts]
        of_step = [row for row in acting if row.mutant.kind != "validation"]
        found = [row for row in of_step if row.large and row.found]
        return cls(
            len(rows),
            sum(row.equivalent and not row.error for row in rows),
            sum(row.stopped and not row.error for row in rows),
            sum(bool(row.error) for row in rows),
            _found([row for row in of_step if row.large]),
            Share(sum(row.exact for row in found), len(found)),
            _found([row for row in of_step if row.small]),
            _found([row for row in of_step if not row.large and not row.small]),
            _found([row for row in of_step if not row.large and row.update > LARGE]),
            _found([row for row in acting if row.mutant.kind == "validation"]),
        )

    def lines(self) -> list[str]:
        """Return the score in lines of fewer than 80 characters."""
        return [
            f"move the step by more than 1 %:  {self.large} found in the first check",
            f"  of these named exactly:        {self.named}",
            f"move it by 0.1 to 1 %:           {self.small} found",
            f"move it by less:                 {self.less} found",
            f"  of both, the update by over 1 %: {self.update} found",
            f"move validation's scores alone: {self.validation} found",
            f"change no bit: {self.equivalent}; end the trainer: {self.stopped}; no verdict: {self.errors}; "
            f"mutants: {self.mutants}",
        ]


def _found(rows: Sequence[Row]) -> Share:
    return Share(sum(row.found for row in rows), len(rows))
