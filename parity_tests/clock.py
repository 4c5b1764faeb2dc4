"""A clock that only a test advances, in place of `time`: no assertion depends on the speed of the machine."""

from __future__ import annotations


class Clock:
    """Replace the module `time` in a module that measures durations."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        """Return the time in seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance the clock, without waiting."""
        self.now += seconds
