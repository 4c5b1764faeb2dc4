"""Read a checkpoint of either backend."""

from __future__ import annotations

from pathlib import Path

from lockstep.core.backend import State
from lockstep.core.checkpoint.format import load_checkpoint
from lockstep.scripts.commands.convert import read_orbax


def stored(folder: Path) -> State:
    """Return the state in a checkpoint."""
    return load_checkpoint(folder, read_orbax)[0]


def weights_of(folder: Path) -> bytes:
    """Return the weights in a checkpoint as bytes: names and values, in the order of the names."""
    params = stored(folder).params
    return b"".join(name.encode() + params[name].tobytes() for name in sorted(params))
