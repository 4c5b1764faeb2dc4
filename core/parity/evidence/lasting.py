"""A store that neither blocks the gathering of evidence nor fails with the disk: training only needs the step."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from lockstep.core.backend import Arrays
from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.behind import Behind
from lockstep.core.parity.evidence.store import FolderStore, NoStore, Stored
from lockstep.core.plan.checks import BEHIND_BYTES


class LastingStore(NoStore):
    """A folder that is written in the background. An error of the disk never stops gathering.

    `thread` hashes and writes the tensors one after another. After an error of the disk nothing more is written, and
    gathering continues.
    """

    def __init__(self, make: Callable[[], FolderStore], thread: ThreadPoolExecutor, ranks: int = 1) -> None:
        """Create the folder with `make`, and write in `thread`.

        ranks: number of ranks. Each puts the parts that it holds.
        """
        super().__init__(ranks)
        self._behind = Behind(thread, BEHIND_BYTES)
        self._lost: UserError | None = None
        self._store: FolderStore | None = None
        try:
            self._store = make()
        except UserError as error:
            self._lost = error

    def put(self, kind: str, name: str, array: np.ndarray) -> None:
        """Queue a tensor, which the caller must not change afterwards. Blocks until there is room."""
        array = np.asarray(array)
        self._behind.submit(array, lambda: self._put(kind, name, array))

    def _put(self, kind: str, name: str, array: np.ndarray) -> None:
        try:
            if self._store is not None and self._lost is None:
                self._store.put(kind, name, array)
        except UserError as error:
            self._lost = error
        except Exception as error:  # without one of its tensors, the evidence would describe another step
            self._lost = UserError(f"{kind}/{name}: {type(error).__name__}: {error}")

    def arrays(self, kind: str) -> Arrays:
        """Implement `Store.arrays`, for reading after all tensors are written. Empty if there is no folder."""
        return {} if self._store is None else Stored(self._store, kind)

    @property
    def folder(self) -> Path | None:
        """The folder that is written; None if it could not be made."""
        return None if self._store is None else self._store.folder

    def finish_part(self) -> None:
        """Signal to rank 0 that this part is complete, or lost. `thread` calls it after the last `put`."""
        if self._store is None:
            return
        if self._lost is not None:
            self._store.remove()
            return
        with contextlib.suppress(UserError):  # rank 0 reports that the evidence is lost
            self._store.finish()

    def finish(self, save: Callable[[FolderStore], object], place: Path) -> None:
        """Finish the folder with `save`, and rename it to `place`. An earlier folder there is removed.

        `thread` calls it after the last `put`. Raises UserError if the evidence is lost, and the errors of `save`.
        """
        if self._store is None or self._lost is not None:
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
