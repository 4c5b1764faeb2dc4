"""A candidate from any torch module: a subclass defines how to build it and how its modules map to canonical names.

    class Mine(ModuleCandidate):
        modules = {"wte": "embed", "h.{i}.ln1": "attn_norm", "h.{i}.qkv": fused("attn.q_proj", "attn.k_proj", "attn.v_proj"), …}

        def build(self, config):
            return MyModel(config.model.hidden, …)

The page for users is docs/guide/candidates.md.
"""  # noqa: E501 - a line of code

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.torch_backend import optim
from lockstep.torch_backend.candidate.numerics import Numerics
from lockstep.torch_backend.candidate.session import ModuleSession
from lockstep.torch_backend.device import resolve_device


class ModuleCandidate(Numerics):
    """A backend whose sessions train a torch module: `lockstep parity CONFIG --candidate FILE.py:NAME`."""

    name = "module"

    def open(self, config: RunConfig) -> ModuleSession:
        """Open a session at the run's initial weights. Raises UserError if names, shapes or settings do not match."""
        self.require(config)
        return ModuleSession(self, config)

    def require(self, config: RunConfig) -> None:
        """Raise UserError for a setting that has no effect on a candidate: its module is eager, and has one process."""
        whole = "a candidate's module"
        chosen = config.precision.chosen
        if chosen.fp8 or chosen.scaled or chosen.on_tensor_cores:
            raise UserError(f"precision.policy = {chosen.name!r}: {whole} computes in fp32, fp64, or bf16 by autocast")
        if config.compile.enabled:
            raise UserError(f"compile.enabled = true: {whole} runs eagerly; take --compile.enabled false")
        if config.train.ranks > 1:
            raise UserError(f"train.ranks = {config.train.ranks}: {whole} is trained by one process")
        if config.attention.needs_documents:
            raise UserError(f"attention.document_mask and reset_positions: {whole} gets no documents")
        if config.loss.of_library or config.loss.z_loss:
            raise UserError(f"loss.head and loss.z_loss: {whole} computes its loss in `losses`")

    def describe(self, config: RunConfig) -> Mapping[str, Any]:
        """Return versions, the device and the settings in force."""
        device = resolve_device(config)
        return {
            "backend": self.name,
            "versions": {"torch": torch.__version__},
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "device_kind": device.type,
            "in_force": {"program": f"{type(self).__name__}, eager", "optimizer": optim.in_words(config)},
        }
