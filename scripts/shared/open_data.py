"""A run's data, or the command that makes it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.errors import UserError

if TYPE_CHECKING:
    from lockstep.core.config.schema import RunConfig
    from lockstep.core.run.data import RunData


def open_data(config: RunConfig, file: Path, given: Mapping[str, str]) -> RunData:
    """Open and verify the data of a run. `file` and `given` are the run file and the settings on the command line.

    Raises UserError if it is damaged or does not fit, or was never prepared: then it says how to.
    """
    from lockstep.core.data.index import INDEX_NAME
    from lockstep.core.run.data import RunData

    if not (Path(config.data.path) / INDEX_NAME).is_file():
        raise UserError(f"{config.data.path} holds no prepared data; make it with: {preparing(file, given)}")
    return RunData.open(config)


def preparing(file: Path, given: Mapping[str, str]) -> str:
    """The command that prepares the data of a run file under these settings."""
    told = {key: text for key, text in given.items() if key.startswith("data.") or key == "model.vocab_size"}
    words = ["lockstep", "data", "prepare", str(file)]
    for key, text in told.items():
        words += [f"--{key.replace('_', '-')}", text]
    return shlex.join(words)
