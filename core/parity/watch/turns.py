"""Choose which operations of a step a check judges: one of each kind first, then all in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# A kind of operation: its name, phase, class of the module, and dtypes of its inputs.
Kind = tuple[str, ...]


@dataclass
class Turns:
    """A schedule of the operations in a step's list, `count` a check.

    kinds: of the operations of the last step that was seen, in order. times: how often each place had its turn.
    done: places that were judged.
    """

    count: int
    kinds: Sequence[Kind] = ()
    seen_kinds: set[Kind] = field(default_factory=set)
    times: list[int] = field(default_factory=list)
    done: set[int] = field(default_factory=set)

    def see(self, kinds: Sequence[Kind]) -> None:
        """Take the list of a step's operations. A list of another length is another program: turns begin anew."""
        if len(kinds) != len(self.kinds):
            self.times, self.done = [0] * len(kinds), set()
        self.kinds = tuple(kinds)

    def wanted(self) -> set[int]:
        """Return the places that are judged next: of kinds that had no turn, then those that had fewest."""
        first: dict[Kind, int] = {}
        for place, kind in enumerate(self.kinds):
            if kind not in self.seen_kinds:
                first.setdefault(kind, place)
        found = list(first.values())[: self.count]
        rest = sorted(set(range(len(self.kinds))) - set(found), key=lambda place: (self.times[place], place))
        return {*found, *rest[: self.count - len(found)]}

    def had(self, place: int, kind: Kind, judged: bool) -> None:
        """Count a turn in. judged: it could be judged."""
        self.seen_kinds.add(kind)
        if place < len(self.times):
            self.times[place] += 1
            if judged:
                self.done.add(place)
