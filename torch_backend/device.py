"""Which device a run computes on."""

from __future__ import annotations

import torch

from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError


def resolve_device(config: RunConfig) -> torch.device:
    """The device asked for; `auto` takes CUDA where there is one. Raises UserError if CUDA was asked for in vain."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device = 'cuda' was asked for, but torch sees no CUDA device here; use device = 'cpu' or 'auto'"
        )
    if config.device == "cpu" or not torch.cuda.is_available():
        if config.precision.chosen.on_tensor_cores:
            asked = config.precision.policy
            raise UserError(f"precision.policy = {asked!r} is a format of CUDA's tensor cores; on the CPU use fp32")
        return torch.device("cpu")
    return torch.device("cuda")


def processor(device: torch.device) -> str:
    """What decides how a device rounds: the GPU's name, or the CPU's instructions and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
