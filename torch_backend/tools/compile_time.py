"""The time that torch.compile takes in this process: tracing, compiling, reading cached programs, CUDA graphs.

Python's garbage collector is off meanwhile (core/collector.py).
"""

from __future__ import annotations

import time
from typing import Any

from lockstep.core.collector import Pause


class CompileTime:
    """A stopwatch that torch starts and stops at each compilation; nested compilations count once.

    seconds: of all compilations that were counted and have ended.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0
        self._pause = Pause()

    def count(self) -> None:
        """Count compilations from now on, until torch._dynamo.reset. A second call does nothing."""
        # torch.compile imports this module anyway, which takes half a second.
        from torch._dynamo.callback import callback_handler

        if self._begin not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._begin)
            callback_handler.register_end_callback(self._end)

    def _begin(self, _: Any) -> None:
        self._started = time.perf_counter()
        self._pause.begin()

    def _end(self, _: Any) -> None:
        self._pause.end()
        self.seconds += time.perf_counter() - self._started


COMPILE_TIME = CompileTime()
