"""Memory in use on a device."""

from __future__ import annotations

import torch

from lockstep.core.train.process_memory import process_memory


def memory(device: torch.device) -> dict[str, float]:
    """Return bytes in use: on CUDA `allocated` and `reserved`, and the `peak` allocated since the last call.

    The call resets the peak, and does not synchronise: torch.cuda.memory_stats counts on the host. On the CPU, return
    the memory of the process.
    """
    if device.type != "cuda":
        return process_memory()
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    found = {name: float(stats.get(f"{name}_bytes.all.current", 0)) for name in ("allocated", "reserved")}
    return {**found, "peak": float(stats.get("allocated_bytes.all.peak", 0))}


def free_memory(device: torch.device) -> float:
    """Return the bytes of a GPU that are free: not allocated, or reserved by torch and not in use."""
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
