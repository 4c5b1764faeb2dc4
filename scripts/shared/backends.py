"""Backends by the names that people use."""

from __future__ import annotations

from lockstep.core.backend import Backend
from lockstep.core.config.schema import RunConfig
from lockstep.core.data.memory import total_memory_bytes
from lockstep.core.model.budget import require_memory

TRAINER = "lockstep.torch_backend.session:TorchBackend"
REFERENCE = "lockstep.jax_backend.session:JaxBackend"

BY_NAME = {"torch": TRAINER, "jax": REFERENCE}


def spec(name: str) -> str:
    """`torch` and `jax` by name; anything else is `module:NAME` or `FILE.py:NAME` already."""
    return BY_NAME.get(name, name)


def on_its_device(config: RunConfig, backend: Backend) -> RunConfig:
    """The configuration with `device` resolved: the twin follows the attention kernel of the candidate's device.

    Raises UserError if the run cannot fit into this machine's memory.
    """
    describe = getattr(backend, "describe", None)
    kind = describe(config).get("device_kind", "cpu") if describe else "cpu"
    config = config.model_copy(update={"device": kind})
    require_memory(config, total_memory_bytes())
    return config
