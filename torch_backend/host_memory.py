"""Settings of malloc for training on the CPU: freed memory stays in the process, without holes between live blocks.

By default glibc returns large freed blocks to the system, and each new block causes page faults. An eager step on the
CPU allocates and frees some hundred megabytes. With glibc's default thresholds the quickstart's step takes 20,000 to
29,000 page faults, 5 to 9 % of its time. So freed memory is kept, in the heap.

Weights and moments live as long as the run. In that heap they would leave holes between them that a step's blocks do
not fit, and the peak would be higher by a tenth. They are allocated before the end of the first step, so until then
each large block has a mapping of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from ctypes import CDLL

# <malloc.h>
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# Bytes: blocks with a mapping of their own until the first step has ended. It is glibc's default, which grows by itself
# unless it is set.
MAPPED_AT_FIRST = 2**17
# Bytes: the largest threshold that glibc accepts for such blocks, and the most freed memory that it keeps at the end of
# the heap.
MAPPED_ABOVE, KEPT = 2**25, 2**29
# Environment variables by which a user sets the thresholds.
ENVIRONMENT = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


class HostMemory:
    """The settings of malloc in this process, in two phases. A second session of the process changes nothing."""

    def __init__(self) -> None:
        self._begun = self._kept = False

    def begin(self) -> bool:
        """Set malloc to give each large block a mapping of its own, until `keep`; return True if this call set it.

        False if the C library has no mallopt, or if an environment variable sets malloc's thresholds.
        """
        mallopt = _mallopt()
        if self._begun or mallopt is None:
            return False
        self._begun = bool(mallopt(M_MMAP_THRESHOLD, MAPPED_AT_FIRST))
        return self._begun

    def keep(self) -> None:
        """Make malloc keep up to 512 MiB of freed memory in this process from now on, if `begin` has set it."""
        if self._begun and not self._kept and (mallopt := _mallopt()):
            self._kept = bool(mallopt(M_MMAP_THRESHOLD, MAPPED_ABOVE) and mallopt(M_TRIM_THRESHOLD, KEPT))


def _mallopt() -> Callable[[int, int], int] | None:
    if os.name != "posix" or any(name in os.environ for name in ENVIRONMENT):
        return None
    found: Callable[[int, int], int] | None = getattr(CDLL(None), "mallopt", None)
    return found


HOST_MEMORY = HostMemory()
