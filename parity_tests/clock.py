"""A clock that stands still until a test moves it, in place of `time`: no assertion depends on a machine's speed."""

from __future__ import annotations


class Clock:
    """Stand in for the module `time` of a module that measures."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        """Return the seconds so far."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move the clock on."""
        self.now += seconds
