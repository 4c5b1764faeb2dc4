"""A checkpoint that is read a tensor at a time is the one that is read at once, or is refused as that is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lockstep.core.backend import State
from lockstep.core.checkpoint.format import CorruptCheckpoint, load_checkpoint, save_checkpoint
from lockstep.core.checkpoint.reader import opened_checkpoint
from lockstep.parity_tests.tiny import tiny_config
from lockstep.torch_backend.session import TorchSession


def test_it_is_what_is_read_at_once(tmp_path: Path) -> None:
    state = TorchSession(tiny_config()).state()
    odd = State(3, {**state.params, "scalar": np.asarray(2.5)}, state.optimizer, {"loss_scale": 2.0})
    path = save_checkpoint(tmp_path, odd, {})
    at_once, _ = load_checkpoint(path)
    with opened_checkpoint(path) as found:
        assert (found.step, found.scalars) == (at_once.step, at_once.scalars)
        assert found.params.keys() == odd.params.keys() and found.optimizer.keys() == odd.optimizer.keys()
        for kind, arrays in {"params": at_once.params, **at_once.optimizer}.items():
            lazy = found.params if kind == "params" else found.optimizer[kind]
            assert all(np.array_equal(lazy[name], array) for name, array in arrays.items())
        with pytest.raises(KeyError):
            found.params["absent"]


def test_damage_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, TorchSession(tiny_config()).state(), {})
    file = path / "params.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CorruptCheckpoint, match=r"params\.safetensors was damaged"), opened_checkpoint(path):
        pass
