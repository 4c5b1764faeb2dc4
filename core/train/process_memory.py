"""Memory of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def process_memory() -> dict[str, float]:
    """Return bytes: `resident`, this process's memory in RAM now, and `peak`, its maximum since the process began.

    Values are from /proc: on Linux, getrusage's maximum includes the parent process, which may have been larger. On
    systems without /proc, only the peak is returned.
    """
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    sizes = {
        key: int(rest.split()[0]) * 1024.0 for key, _, rest in (line.partition(":") for line in lines) if "kB" in rest
    }
    if {"VmRSS", "VmHWM"} <= sizes.keys():
        return {"resident": sizes["VmRSS"], "peak": max(sizes["VmHWM"], sizes["VmRSS"])}
    return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)}
