"""Keep gathering from failing where the disk does: training needs the step, not its evidence."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lockstep.core.backend import Arrays
from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.store import FolderStore, NoStore


class LastingStore(NoStore):
    """A folder that gathering does not depend on: once the disk has refused, nothing is kept, and gathering goes on."""

    def __init__(self, make: Callable[[], FolderStore]) -> None:
        super().__init__()
        self._lost: UserError | None = None
        self._store: FolderStore | None = None
        try:
            self._store = make()
        except UserError as error:
            self._lost = error

    def put(self, kind: str, name: str, array: np.ndarray) -> None:
        """Put the tensor, or drop it."""
        try:
            if self._store is not None:
                self._store.put(kind, name, array)
        except UserError as error:
            self._lost, self._store = error, None

    def arrays(self, kind: str) -> Arrays:
        """As in `Store`; nothing once it is lost."""
        return {} if self._store is None else self._store.arrays(kind)

    def finish(self, save: Callable[[FolderStore], object], place: Path) -> None:
        """Let `save` finish the folder, and rename it to `place`, where whatever was there is removed.

        Raises UserError if the evidence is lost, and what `save` raises.
        """
        if self._store is None:
            assert self._lost is not None
            raise self._lost
        try:
            save(self._store)
            shutil.rmtree(place, ignore_errors=True)
            os.rename(self._store.folder, place)
        except OSError as error:
            raise UserError(f"cannot write the evidence {place}: {error.strerror or error}") from error
        finally:
            self._store.remove()
