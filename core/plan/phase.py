"""Memory over time: what a phase of a step leaves behind, and the most that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """Memory of a stretch of the step.

    net: bytes held more at the end than at the start. peak: the most held above the start, at least 0 and net.

    made: bytes of all tensors that were allocated on the way, which is what memory has to move at least twice.
    """

    net: float = 0.0
    peak: float = 0.0
    made: float = 0.0

    def __add__(self, after: Phase) -> Phase:
        """Return this phase followed by `after`."""
        return Phase(self.net + after.net, max(self.peak, self.net + after.peak), self.made + after.made)

    def times(self, count: int) -> Phase:
        """Repeat this phase `count` times in a row."""
        if not count:
            return Phase()
        peak = max(self.peak, (count - 1) * self.net + self.peak)
        return Phase(count * self.net, peak, count * self.made)

    def beside(self, held: float) -> Phase:
        """Return this phase while `held` more bytes are there from its start to its end."""
        return Phase(self.net, held + self.peak, self.made)


def held(change: float) -> Phase:
    """Allocate so many bytes, or free them if negative."""
    return Phase(change, max(0.0, change))


class Tape:
    """A record of tensors made and freed by name, which gives the bytes left and the peak."""

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self.there = dict(before or {})
        self._start = self._now = self._most = sum(self.there.values())
        self._made = 0.0

    def make(self, **sizes: float) -> None:
        """Allocate tensors of so many bytes, all of them there at the same time."""
        for name, size in sizes.items():
            assert name not in self.there, name
            self.there[name] = size
            self._now += size
            self._made += size
        self._most = max(self._most, self._now)

    def free(self, *names: str) -> None:
        """Free tensors. Raises KeyError for one that is not there."""
        for name in names:
            self._now -= self.there.pop(name)

    def free_if(self, *names: str) -> None:
        """Free those of these tensors that are there."""
        self.free(*(name for name in names if name in self.there))

    @property
    def phase(self) -> Phase:
        """The phase from the start until now."""
        return Phase(self._now - self._start, self._most - self._start, self._made)
