"""Available memory."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int:
    """Return the bytes that can be allocated without swapping: the kernel's estimate, within the container's limit.

    Returns 0 if the system does not report it; callers then choose the way that needs the least memory.
    """
    limit = _container_bytes()
    machine = _machine_bytes()
    return machine if limit is None else min(machine, limit)


def total_memory_bytes() -> int:
    """Return the bytes that this process could have alone; 0 if the system does not report it.

    It is the minimum of the machine's memory, the container's limit and the process's own limit (`ulimit -v`).
    """
    found = []
    with contextlib.suppress(OSError, ValueError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):
        found.append(int((_CGROUP / "memory.max").read_text()))
    if (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        found.append(limit)
    return min(found, default=0)


def _machine_bytes() -> int:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _container_bytes() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = (_CGROUP / "memory.current").read_text().strip()
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))
