"""`lockstep`, to be killed, with a fault: `python -m parity_tests.cli.faulty FAULT` is set in the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from core import checkpoint
from scripts import killed_at

VARIABLE = "LOCKSTEP_FAULT"


def in_place() -> None:
    """A checkpoint is written in its place instead of aside."""
    begin = checkpoint.Pending.begin

    def begin_in_place(self: Any, write: Any) -> None:
        self._aside = self.final
        begin(self, write)

    def commit(self: Any) -> Path:
        self._writing.wait()
        checkpoint._seal_folder(self.final, self._writing, self._extra)
        return self.final

    checkpoint.Pending.begin, checkpoint.Pending.commit = begin_in_place, commit  # type: ignore[method-assign]


def moments_lost() -> None:
    """A resume begins with moments of zero."""
    load = checkpoint.load_checkpoint

    def without(folder: Path, read: Any = None) -> Any:
        state, extra = load(folder, read)
        for arrays in state.optimizer.values():
            for name, array in arrays.items():
                arrays[name] = 0 * array  # type: ignore[index]
        return state, extra

    checkpoint.load_checkpoint = without


if __name__ == "__main__":
    {"in_place": in_place, "moments_lost": moments_lost}[os.environ[VARIABLE]]()
    killed_at.main()
