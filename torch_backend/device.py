"""The device that a run computes on."""

from __future__ import annotations

import torch

from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError


def resolve_device(config: RunConfig) -> torch.device:
    """Return the run's device; `auto` is CUDA if there is a CUDA device, else the CPU.

    Raises UserError if the configured CUDA device is missing, or if the precision policy cannot run on the CPU.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device = 'cuda' was asked for, but torch finds no CUDA device; use device = 'cpu' or 'auto'")
    if config.device == "cpu" or not torch.cuda.is_available():
        if config.precision.chosen.on_tensor_cores:
            asked = config.precision.policy
            raise UserError(f"precision.policy = {asked!r} needs CUDA's tensor cores; on the CPU use fp32")
        return torch.device("cpu")
    return torch.device("cuda")


def processor(device: torch.device) -> str:
    """Name the hardware on which rounding depends: the GPU, or the CPU's instruction set and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
