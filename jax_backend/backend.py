"""The reference as a backend of core/backend.py: opens sessions, and describes what is in force."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import flax
import jax
import optax

from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.jax_backend.device import use_device
from lockstep.jax_backend.optim import in_words
from lockstep.jax_backend.session import KERNELS, JaxSession, kernel_followed
from lockstep.jax_backend.sharding import Shards

# On a GPU. An operation without a deterministic kernel then raises.
XLA_FLAG = "--xla_gpu_deterministic_ops=true"


class JaxBackend:
    """The backend that opens `JaxSession`s."""

    name = "jax"
    threads = True
    resolves_kernel = True

    def open(self, config: RunConfig) -> JaxSession:
        """Open a session at the initial weights of `config`. Raises UserError if its devices are not there."""
        use_device(config)
        return JaxSession(config)

    def describe(self, config: RunConfig) -> Mapping[str, Any]:
        """Return versions, the device and what is in force.

        Raises UserError if XLA needs a setting to be deterministic, if a requested device is missing, or if orbax,
        which writes a run's checkpoints, is not installed.
        """
        use_device(config)
        if find_spec("orbax.checkpoint") is None:
            raise UserError("checkpoints of JAX are written by orbax: pip install orbax-checkpoint")
        if config.deterministic and jax.default_backend() == "gpu" and XLA_FLAG not in os.environ.get("XLA_FLAGS", ""):
            raise UserError(f"deterministic = true needs XLA_FLAGS={XLA_FLAG} in the environment before JAX starts")
        return {
            "backend": self.name,
            "versions": {"jax": jax.__version__, "flax": flax.__version__, "optax": optax.__version__},
            "device": jax.devices()[0].device_kind,
            "in_force": {
                "program": "jax.jit",
                "attention": f"written out, rounding as {KERNELS[kernel_followed(config)]}",
                "optimizer": in_words(config),
                **Shards(config.parity.reference_devices).in_force(),
            },
        }
