"""Python's collector, which searches for cycles of objects that nothing else refers to: off where nearly all stay.

Imports and compilations create hundreds of thousands of objects and free next to none. Python counts new objects, and
so it searches all of them again and again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import modules while the collector is off. After the first import it leaves out all objects that exist then.

    Objects that exist at later imports are not left out: a session refers to itself, so without the collector its
    memory would never be freed.
    """
    pause = Pause()
    pause.begin()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
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
