"""Signals of a process that uses Ray."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Restore at the end the handler of SIGTERM: Ray's start sets one that prints a C++ stack and ends the process."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # None stands for a handler that Python did not set, and only the main thread may set one.
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
