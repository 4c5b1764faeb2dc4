"""The three functions that are compared, and the results of each on every draw."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.core.parity.honest.function import Answer, Function, Value

__tracebackhide__ = True


@dataclass(frozen=True)
class Functions:
    """The function under test, the plain one, and the one whose FP64 result is the truth."""

    mine: Function
    plain: Function
    truth: Function


@dataclass
class Side:
    """Results of one function over the draws, by name."""

    answers: list[Answer] = field(default_factory=list)

    def of(self, name: str) -> list[Value]:
        """Return a result on every draw that has it."""
        found = (self.results(draw).get(name) for draw in range(len(self.answers)))
        return [one for one in found if one is not None]

    def results(self, draw: int) -> dict[str, Value | None]:
        """Return a draw's outputs and gradients by name."""
        one = self.answers[draw]
        return {**one.outputs, **{gradient_name(name): g for name, g in one.grads.items()}}


def gradient_name(name: str) -> str:
    """Return the name of a gradient in a report."""
    return f"grad {name}"
