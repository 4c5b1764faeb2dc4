"""The trainer as a `Backend` of core/backend.py: it opens sessions, and describes the settings in force."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.core.backend import Session
from lockstep.core.config.auto import settled
from lockstep.core.config.schema import RunConfig
from lockstep.torch_backend.attention import check_kernel, in_force
from lockstep.torch_backend.device import resolve_device
from lockstep.torch_backend.host_memory import HOST_MEMORY
from lockstep.torch_backend.kernels.bitsandbytes_adamw import check_bitsandbytes
from lockstep.torch_backend.kernels.float8 import float8
from lockstep.torch_backend.kernels.library_heads import check_head
from lockstep.torch_backend.kernels.recompute import in_force as recompute_in_force
from lockstep.torch_backend.optim import (
    in_words,
)
from lockstep.torch_backend.precision import products_in_force
from lockstep.torch_backend.ranks.ddp import in_force as ranks_in_force
from lockstep.torch_backend.ranks.sharded_tensors import (
    check_sharded,
)
from lockstep.torch_backend.session import TorchSession
from lockstep.torch_backend.switches import check_environment
from lockstep.torch_backend.tools.deterministic import check_deterministic
from lockstep.torch_backend.tools.nvtx import in_force as ranges_in_force


class TorchBackend:
    """A backend that opens `session_class` on a configuration; a candidate sets its own session class."""

    name = "torch"
    # This backend opens sessions of several ranks.
    ranked = True
    resolves_kernel = True
    session_class: type[TorchSession] = TorchSession

    def open(self, config: RunConfig) -> Session:
        """Open a session at the initial weights of `config`, over several ranks if `train.ranks` is above 1.

        With one rank on the CPU, the process keeps freed memory after the first step (torch_backend/host_memory.py).

        Raises UserError if the device is missing, or if a configured kernel, loss head, optimizer, deterministic mode
        or sharding cannot run on it.
        """
        check_kernel(config, resolve_device(config))
        check_head(config.loss, resolve_device(config))
        check_bitsandbytes(config.optim)
        check_deterministic(config, resolve_device(config))
        check_sharded(config)
        if config.train.ranks == 1:
            # Several ranks share the machine's memory, so in a large check each rank returns its freed memory to the
            # system (core/parity/evidence/place.py).
            if resolve_device(config).type == "cpu":
                HOST_MEMORY.begin()
            return self.open_rank(config)
        from lockstep.torch_backend.ranks import peer_session

        return peer_session.open_among_peers(self, config)

    def open_rank(self, config: RunConfig) -> TorchSession:
        """Open the session of one rank, before it joins the others."""
        return self.session_class(config)

    def describe(self, config: RunConfig) -> Mapping[str, Any]:
        """Return versions, the device and the settings in force. Raises UserError as `open` does."""
        device = resolve_device(config)
        check_kernel(config, device)
        check_head(config.loss, device)
        check_bitsandbytes(config.optim)
        check_deterministic(config, device)
        check_environment(config.precision.policy, device)
        check_sharded(config)
        float8(config.precision, device)
        config = settled(config, device.type)
        scope = "" if config.compile.scope == "model" else ", block by block"
        mode = "" if config.compile.mode == "default" else f", {config.compile.mode}"
        compiled = (
            f"torch.compile({config.compile.backend}, fullgraph{mode}{scope})" if config.compile.enabled else "eager"
        )
        return {
            "backend": self.name,
            "versions": {"torch": torch.__version__},
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
            "device_kind": device.type,
            "threads": torch.get_num_threads(),
            "in_force": {
                "program": compiled,
                **products_in_force(config, device),
                "attention": in_force(config.attention, device, config.deterministic),
                "loss head": config.loss.chosen.in_force(config.loss.chunk, config.loss.z_loss),
                "recomputed": recompute_in_force(config.recompute),
                "optimizer": in_words(config),
                **ranks_in_force(config, device.type),
                **ranges_in_force(config, device),
            },
        }
