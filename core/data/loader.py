"""Prefetch batches on a background thread while the device computes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

from lockstep.core.errors import UserError

T = TypeVar("T")

_JOIN_SECONDS = 5.0
# Seconds between two tests of a waiting consumer for whether the producer is alive.
_LOOK_SECONDS = 1.0


class LoaderError(UserError):
    """An error in the making of a step's batch. The message names the step and the reason."""


class Prefetcher(Generic[T]):
    """An iterator over make(start), …, make(stop - 1), computed in advance on a background thread.

    The only state is the step number: a new Prefetcher that starts at step k yields the same results from step k on. It
    is also a context manager, and leaving the context ends the thread.
    """

    def __init__(self, make: Callable[[int], T], start: int, stop: int, depth: int = 2) -> None:
        """Start the thread.

        Args:
            make: a pure function of the step; called in order, on one thread.
            start: the first step.
            stop: one past the last step.
            depth: maximum number of finished results in the queue.

        Raises:
            ValueError: depth is below one.
        """
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self._make = make
        self._depth = depth
        self._steps = range(start, stop)
        self._ready: deque[T] = deque()
        self._failure: BaseException | None = None
        self._done = False
        self._step = start  # the step whose batch is being made
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._produce, name="lockstep-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        """Return itself; all loops share one position."""
        return self

    def __next__(self) -> T:
        """Wait for the next step's result and return it.

        Raises:
            StopIteration: after the last step, or after a failure was raised.
            RuntimeError: after `close`.
            LoaderError: `make` raised an error at this step, or the thread ended without an error.
        """
        with self._changed:
            while not (self._ready or self._done or self._closed) and self._thread.is_alive():
                self._changed.wait(_LOOK_SECONDS)
            if self._closed:
                raise RuntimeError("this Prefetcher is closed")
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            if not self._done:
                self._done = True
                raise LoaderError(f"step {self._step}: its batch was not made: the loader's thread has ended")
            failure, self._failure = self._failure, None
        if failure is not None:
            said = str(failure) if isinstance(failure, UserError) else f"{type(failure).__name__}: {failure}"
            raise LoaderError(f"step {self._step}: its batch could not be made: {said}") from failure
        raise StopIteration

    def __enter__(self) -> Prefetcher[T]:
        """Return itself; leaving the context closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Discard results in the queue and end the thread; it may be called twice.

        A thread inside `make` ends when `make` returns. `close` waits at most five seconds for it. The thread is a
        daemon and does not keep the process alive.
        """
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(_JOIN_SECONDS)

    def _produce(self) -> None:
        try:
            for step in self._steps:
                self._step = step
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                    if self._closed:
                        return
                item = self._make(step)
                with self._changed:
                    if self._closed:
                        return
                    self._ready.append(item)
                    self._changed.notify_all()
        except BaseException as error:
            # Catch SystemExit and similar errors too: the consumer must never wait for a thread that has ended.
            self._failure = error
        finally:
            with self._changed:
                self._done = True
                self._changed.notify_all()
