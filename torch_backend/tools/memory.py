"""Memory that a session uses."""

from __future__ import annotations

import torch

from lockstep.core.train.process_memory import process_memory


def memory(device: torch.device) -> dict[str, float]:
    """Return bytes: on CUDA `allocated` and `reserved` now, and `peak` allocated since the last call, which it resets.

    torch.cuda.memory_stats counts on the host: nothing is waited for. On the CPU, what the process holds.
    """
    if device.type != "cuda":
        return process_memory()
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    found = {name: float(stats.get(f"{name}_bytes.all.current", 0)) for name in ("allocated", "reserved")}
    return {**found, "peak": float(stats.get("allocated_bytes.all.peak", 0))}


def free_memory(device: torch.device) -> float:
    """Return bytes of a GPU that a tensor may still take: unallocated, or reserved by torch and not in use."""
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
