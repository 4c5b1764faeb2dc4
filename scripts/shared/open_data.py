"""A run's data, or the command that makes it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.errors import UserError
from lockstep.core.sinks.lines import complain

if TYPE_CHECKING:
    from lockstep.core.config.schema import RunConfig
    from lockstep.core.run.data import RunData


def open_data(config: RunConfig, file: Path, given: Mapping[str, str]) -> RunData:
    """Open and verify the data of a run. `file` and `given` are the run file and the settings on the command line.

    Raises UserError if it is damaged, does not fit, or was never prepared; then the message has the command.
    """
    from lockstep.core.data.index import INDEX_NAME
    from lockstep.core.files.lock import LOCK_NAME
    from lockstep.core.run.data import RunData

    folders = config.data.folders
    # A folder that is being prepared has its lock first.
    named = (INDEX_NAME, LOCK_NAME) if config.data.wait_minutes else (INDEX_NAME,)
    there = [folder for folder in folders if any((Path(folder) / name).is_file() for name in named)]
    for folder in folders:
        if folder not in there:
            raise UserError(f"{folder} holds no prepared data; make it with: {preparing(config, file, given, there)}")
    return RunData.open(config, complain)


def preparing(config: RunConfig, file: Path, given: Mapping[str, str], there: Sequence[str]) -> str:
    """Return the command that prepares the first folder that a run file lacks under these settings.

    there: the prepared folders of its mixture, whose tokenizer the others take.
    """
    from lockstep.core.data.index import TOKENIZER_NAME

    told = {key: text for key, text in given.items() if key.startswith("data.") or key == "model.vocab_size"}
    if config.data.mixture:
        told.pop("data.mixture", None)
        missing = next(folder for folder in config.data.folders if folder not in there)
        told |= {"data.path": missing, "data.source": told.get("data.source", "TEXT")}
        if there:
            told |= {"data.tokenizer": str(Path(there[0]) / TOKENIZER_NAME)}
    return command("data prepare", file, told)


def command(name: str, file: Path, given: Mapping[str, str]) -> str:
    """Return a command to type, with the given settings of the run file."""
    words = ["lockstep", *name.split(), str(file)]
    for key, text in given.items():
        words += [f"--{key.replace('_', '-')}", text]
    return shlex.join(words)
