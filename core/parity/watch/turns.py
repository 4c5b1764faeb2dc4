"""Choose the operations of a step that a check judges: first one of each kind, then all in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# The kind of an operation: its name, phase, module class, and the dtypes of its inputs.
Kind = tuple[str, ...]


@dataclass
class Turns:
    """A schedule over the operations of a step, `count` in each check.

    kinds: kinds of the operations of the last step seen, in order.
    times: number of turns of each place.
    done: places that were judged.
    """

    count: int
    kinds: Sequence[Kind] = ()
    seen_kinds: set[Kind] = field(default_factory=set)
    times: list[int] = field(default_factory=list)
    done: set[int] = field(default_factory=set)

    def see(self, kinds: Sequence[Kind]) -> None:
        """Set the list of a step's operations.

        A list of another length is another program, so the turns begin again.
        """
        if len(kinds) != len(self.kinds):
            self.times, self.done = [0] * len(kinds), set()
        self.kinds = tuple(kinds)

    def wanted(self) -> set[int]:
        """Return the places to judge next: first kinds without a turn so far, then places with the fewest turns."""
        first: dict[Kind, int] = {}
        for place, kind in enumerate(self.kinds):
            if kind not in self.seen_kinds:
                first.setdefault(kind, place)
        found = list(first.values())[: self.count]
        rest = sorted(set(range(len(self.kinds))) - set(found), key=lambda place: (self.times[place], place))
        return {*found, *rest[: self.count - len(found)]}

    def had(self, place: int, kind: Kind, judged: bool) -> None:
        """Count a turn. judged: the operation could be judged."""
        self.seen_kinds.add(kind)
        if place < len(self.times):
            self.times[place] += 1
            if judged:
                self.done.add(place)
