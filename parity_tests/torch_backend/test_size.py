"""The model is as large as its name: the 1.24B run counted without allocating it."""

from __future__ import annotations

import torch

from lockstep.core.config.file import load_config
from lockstep.core.model.names import parameter_shapes
from lockstep.parity_tests.repository import REPO
from lockstep.torch_backend.model import Transformer


def test_llama_1b_has_1_241_581_568_parameters():
    config = load_config(REPO / "configs" / "llama-1b.toml")
    with torch.device("meta"):
        model = Transformer(config)
    parameters = dict(model.named_parameters())
    assert all(p.is_meta for p in (*parameters.values(), *model.buffers()))
    assert sum(p.numel() for p in parameters.values()) == 1_241_581_568
    assert {name: tuple(p.shape) for name, p in parameters.items()} == parameter_shapes(config.model)
