"""Memory of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def process_memory() -> dict[str, float]:
    """Return bytes: `resident`, what of this process is in RAM now, and `peak`, the most since it began.

    Linux's getrusage counts on from the process that started this one, which may have been larger; /proc does not.
    Where there is no /proc, the peak alone.
    """
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    sizes = {
        key: int(rest.split()[0]) * 1024.0 for key, _, rest in (line.partition(":") for line in lines) if "kB" in rest
    }
    if {"VmRSS", "VmHWM"} <= sizes.keys():
        return {"resident": sizes["VmRSS"], "peak": max(sizes["VmHWM"], sizes["VmRSS"])}
    return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)}
