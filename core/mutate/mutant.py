"""Name a mutant: a place in the step, an operator that changes the tensor or number there, and a condition."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lockstep.core.errors import UserError, printable

_ID = re.compile(
    r"(?P<place>[^:*@]+):(?P<kind>[a-z]+)\*(?P<operator>[a-z0-9]+(\([^()*@]*\))?)@(?P<condition>[a-z0-9-]+)"
)
_POWER = re.compile(r"([+-])2\^-(\d+)")


@dataclass(frozen=True)
class Operator:
    """A change of one tensor or number.

    name: `drop`, `twice`, `scale`, `narrow`, … (`OPERATORS` of core/mutate/operators.py). arguments: the text between
    the brackets of the id.
    """

    name: str
    arguments: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Operator:
        """Return the operator that `str` wrote."""
        name, _, rest = text.partition("(")
        return cls(name, tuple(rest.removesuffix(")").split(",")) if rest else ())

    @property
    def factor(self) -> float:
        """Return 1 ± 2⁻ᵏ of a `scale`. Raises ValueError for arguments other than `+2^-k` or `-2^-k`."""
        found = _POWER.fullmatch(self.arguments[0]) if len(self.arguments) == 1 else None
        if found is None:
            raise ValueError(f"{self}: a scale is written +2^-6 or -2^-6")
        return 1 + (1 if found[1] == "+" else -1) * 2.0 ** -int(found[2])

    @property
    def size(self) -> float:
        """Return |1 − factor| of a `scale`."""
        return abs(self.factor - 1)

    def __str__(self) -> str:
        return f"{self.name}({','.join(self.arguments)})" if self.arguments else self.name


@dataclass(frozen=True)
class Mutant:
    """A change of a trainer.

    place: the name of the changed tensor or number: a tap, `TAP.role` for one input of an operation, or a parameter.
    kind:  what of it is changed (core/mutate/places.py). condition: when (core/mutate/conditions.py).
    """

    place: str
    kind: str
    operator: Operator
    condition: str

    @classmethod
    def parse(cls, text: str) -> Mutant:
        """Return the mutant of an id such as `blocks.1.mlp.act:backward*scale(+2^-6)@ones`.

        Raises UserError for text that is not an id.
        """
        found = _ID.fullmatch(text)
        if found is None:
            raise UserError(
                f"{printable(text)[:120]!r} is not a mutant; write PLACE:KIND*OPERATOR@CONDITION, as in "
                "blocks.1.mlp.act:backward*scale(+2^-6)@always"
            )
        return cls(found["place"], found["kind"], Operator.parse(found["operator"]), found["condition"])

    def __str__(self) -> str:
        return f"{self.place}:{self.kind}*{self.operator}@{self.condition}"
