"""Python's collector, which searches for cycles of objects that nothing else refers to: off where nearly all stay.

Imports and compilations create hundreds of thousands of objects and free next to none. Python counts new objects, and
so it searches all of them again and again.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# More modules than these are torch or JAX, at the start of a command. Fewer may be loaded at any time, when objects
# that end before the process exist.
MANY = 100


@contextmanager
def importing() -> Iterator[None]:
    """Import modules while the collector is off. If many were loaded, it leaves out all present objects from then on.

    They are not frozen after a small import: a session in a cycle would never be freed.
    """
    pause, loaded = Pause(), len(sys.modules)
    pause.begin()
    try:
        yield
    finally:
        if len(sys.modules) - loaded > MANY:
            gc.freeze()
        pause.end()


class Pause:
    """A pause of the collector whose beginning and end are calls."""

    def __init__(self) -> None:
        self._was_on = False

    def begin(self) -> None:
        """Turn the collector off."""
        self._was_on = gc.isenabled()
        gc.disable()

    def end(self) -> None:
        """Turn the collector on again if it was on at the beginning."""
        if self._was_on:
            gc.enable()
