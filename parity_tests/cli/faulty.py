"""Lockstep with a planted fault, for tests that kill it: `python -m lockstep.parity_tests.cli.faulty`, FAULT=name."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.core.backend import State
from lockstep.core.checkpoint.format import Pending, _seal_folder
from lockstep.scripts.studies import killed_at
from lockstep.torch_backend.session import TorchSession

VARIABLE = "LOCKSTEP_FAULT"


def in_place() -> None:
    """Write checkpoints to their final path directly, without a temporary path and a rename."""
    begin = Pending.begin

    def begin_in_place(self: Any, write: Any) -> None:
        self._aside = self.final
        begin(self, write)

    def commit(self: Any) -> Path:
        self._writing.wait()
        _seal_folder(self.final, self._writing, self._extra)
        return self.final

    Pending.begin, Pending.commit = begin_in_place, commit  # type: ignore[method-assign]


def moments_lost() -> None:
    """Resume with all moments zero."""
    load = TorchSession.load

    def without(self: TorchSession, state: State) -> None:
        zeros = {kind: {name: 0 * array for name, array in of.items()} for kind, of in state.optimizer.items()}
        load(self, replace(state, optimizer=zeros))

    TorchSession.load = without  # type: ignore[method-assign]


if __name__ == "__main__":
    {"in_place": in_place, "moments_lost": moments_lost}[os.environ[VARIABLE]]()
    killed_at.main()
