"""Write tensors in a background thread while the next ones are computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, KeysView, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np

from lockstep.core.parity.evidence.index import Entry
from lockstep.core.parity.evidence.store import FolderStore

# Limit in bytes of the queued tensors, for a check in its own process.
WAITING_BYTES = 128 << 20


class Behind:
    """A queue of tensors for a thread, with at most `most` bytes, or a single tensor."""

    def __init__(self, thread: ThreadPoolExecutor, most: int) -> None:
        self._thread, self._most = thread, most
        self._tensors, self._bytes, self._done = 0, 0, threading.Condition()

    def submit(self, array: np.ndarray, work: Callable[[], None]) -> None:
        """Queue `work`, which reads `array` and raises nothing. Block until there is room."""
        with self._done:
            self._done.wait_for(lambda: not self._tensors or self._bytes + array.nbytes <= self._most)
            self._tensors, self._bytes = self._tensors + 1, self._bytes + array.nbytes

        def run() -> None:
            try:
                work()
            finally:
                with self._done:
                    self._tensors, self._bytes = self._tensors - 1, self._bytes - array.nbytes
                    self._done.notify_all()

        self._thread.submit(run)

    def wait(self) -> None:
        """Block until no tensor is queued."""
        with self._done:
            self._done.wait_for(lambda: not self._tensors)


class BehindStore(FolderStore):
    """A folder that a thread writes while `put` returns at once. Reading blocks until all is written.

    The next `put` or read raises an error of the disk. `close` ends the thread.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lockstep-evidence")
        self._behind = Behind(self._thread, WAITING_BYTES)
        self._failed: Exception | None = None
        self._scratches: list[BehindStore] = []

    def put(self, kind: str, name: str, array: np.ndarray) -> None:
        """Implement `Store.put` in the thread.

        Block until there is room. The caller must not change the tensor afterwards.
        """
        array = np.asarray(array)
        self._behind.submit(array, lambda: self._write(kind, name, array))
        self._raise_failure()

    def _write(self, kind: str, name: str, array: np.ndarray) -> None:
        if self._failed is None:
            try:
                super().put(kind, name, array)
            except Exception as error:
                self._failed = error

    def _wait(self) -> None:
        self._behind.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failed is not None:
            raise self._failed

    def scratch(self) -> Self:
        """Implement `Store.scratch`."""
        self._scratches.append(made := super().scratch())
        return made

    def close(self) -> None:
        """Wait for the end of the thread, so that it does not write into a folder that is being removed."""
        for made in self._scratches:
            made.close()
        self._thread.shutdown()

    def names(self, kind: str) -> KeysView[str]:
        """Implement `FolderStore.names`."""
        self._wait()
        return super().names(kind)

    def finish(self, documents: Mapping[str, bytes] | None = None) -> None:
        """Implement `FolderStore.finish`."""
        self._wait()
        super().finish(documents)

    def move(self, folder: Path) -> None:
        """Implement `FolderStore.move`."""
        self._wait()
        super().move(folder)

    def flush(self) -> None:
        """Implement `FolderStore.flush`."""
        self._wait()
        super().flush()

    def _parts(self, kind: str, name: str) -> tuple[Entry, ...]:
        self._wait()
        return super()._parts(kind, name)
