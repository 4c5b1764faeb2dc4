"""Events before a step of a run, in the training process: signals, failures of the disk, waits."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lockstep.torch_backend.session import TorchSession

NO_SPACE, QUOTA, BROKEN = errno.ENOSPC, errno.EDQUOT, errno.EIO


def before_steps(monkeypatch: pytest.MonkeyPatch, events: Mapping[int, Callable[[], object]]) -> None:
    """Call each event once, before the step of the torch trainer that is its key."""
    left = dict(events)
    step = TorchSession.step

    def eventful(self: TorchSession, *arguments: Any, **named: Any) -> Any:
        if event := left.pop(self.steps_done + 1, None):
            event()
        return step(self, *arguments, **named)

    monkeypatch.setattr(TorchSession, "step", eventful)


def written(run: Path, step: int) -> None:
    """Wait until the checkpoint of a step is complete; a thread writes it during the next steps."""
    there(run / "checkpoints" / f"step_{step:06d}")


def there(path: Path) -> None:
    """Wait until `path` exists; fail after 60 s."""
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def settled(run: Path) -> None:
    """Wait until the run writes no checkpoint and no evidence; fail after 60 s."""
    until = time.monotonic() + 60
    while any((run / "checkpoints").glob(".step_*")) or any((run / "evidence").glob(".*.tmp")):
        assert time.monotonic() < until
        time.sleep(0.01)


def in_turn(*calls: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls all of `calls` in order."""

    def all_of_them() -> None:
        for call in calls:
            call()

    return all_of_them


def path_of(descriptor: int) -> str:
    """Return the path of an open file descriptor, from Linux's /proc."""
    return os.readlink(f"/proc/self/fd/{descriptor}")


class Refusing:
    """Make the disk fail while `on`: `write`, `fsync` and `mkdir` on paths that contain `part` raise errno `number`.

    Every second write succeeds in part, as on a disk that becomes full.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, part: str, number: int) -> None:
        self._part, self._number = part, number
        self.on = False
        self.asked = self.failures = 0
        for name in ("write", "fsync"):
            monkeypatch.setattr(os, name, self._of_descriptor(getattr(os, name)))
        monkeypatch.setattr(os, "mkdir", self._of_path(os.mkdir))

    def turn(self, on: bool) -> None:
        self.on = on

    def refused(self) -> None:
        """Wait for the first failure, which may occur in another thread; fail after 60 s."""
        until = time.monotonic() + 60
        while not self.failures:
            assert time.monotonic() < until
            time.sleep(0.01)

    def _failure(self) -> OSError:
        self.failures += 1
        return OSError(self._number, os.strerror(self._number))

    def _of_descriptor(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(descriptor: int, *data: Any) -> Any:
            if self.on and self._part in path_of(descriptor):
                self.asked += 1
                if data and self.asked % 2 and len(data[0]) > 1:  # as if the disk had space for a part of it
                    return call(descriptor, data[0][: len(data[0]) // 2])
                raise self._failure()
            return call(descriptor, *data)

        return refusing

    def _of_path(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(path: Any, *more: Any, **named: Any) -> Any:
            if self.on and self._part in os.fspath(path):
                self.asked += 1
                raise self._failure()
            return call(path, *more, **named)

        return refusing


def fill(folder: Path, leave: int = 0) -> Path:
    """Write a file that leaves only `leave` bytes free on a small disk; return its path."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
        try:
            while True:
                file.write(b"x")
        except OSError:
            pass
        file.truncate(max(0, file.tell() - leave))
    return filler
