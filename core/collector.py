"""Pauses of Python's garbage collector: it is off during imports and compilations.

Both create hundreds of thousands of objects and free next to none. The collector starts whenever enough objects are
new, and it searches all objects, again and again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import modules while the collector is off. After the first import, it ignores all objects that exist by then.

    Objects that exist at a later import are not ignored. A session may be one of them: it refers to itself, so only the
    collector frees its memory.
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
