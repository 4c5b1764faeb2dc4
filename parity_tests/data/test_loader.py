"""The prefetcher keeps order, hands on failures, prefetches no further than configured, and always ends."""

from __future__ import annotations

import threading
import time

import pytest

from lockstep.core.data import loader
from lockstep.core.data.loader import LoaderError, Prefetcher
from lockstep.core.errors import UserError


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_steps_come_in_order(depth):
    with Prefetcher(lambda step: step * step, 3, 50, depth) as batches:
        assert list(batches) == [step * step for step in range(3, 50)]
        assert list(batches) == []


def test_no_steps():
    with Prefetcher(lambda step: step, 5, 5) as batches:
        assert list(batches) == []


def test_it_resumes_at_any_step():
    with Prefetcher(str, 0, 20) as whole, Prefetcher(str, 13, 20) as rest:
        assert list(whole)[13:] == list(rest)


def test_it_looks_ahead_as_far_as_depth_and_no_further():
    made = []
    with Prefetcher(lambda step: made.append(step) or step, 0, 100, 3) as batches:
        assert wait_until(lambda: len(made) == 3)
        time.sleep(0.05)
        assert len(made) == 3
        next(batches)
        assert wait_until(lambda: len(made) == 4)


@pytest.mark.parametrize(
    ("kind", "said"), [(OSError, "OSError: no luck"), (SystemExit, "SystemExit: no luck"), (UserError, "no luck")]
)
def test_a_failure_is_raised_at_its_step(kind, said):
    def make(step):
        if step == 4:
            raise kind("no luck")
        return step

    with Prefetcher(make, 0, 10, 3) as batches:
        assert [next(batches) for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(LoaderError, match=f"^step 4: its batch could not be made: {said}$"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)


def test_a_thread_that_ends_without_a_word_is_not_waited_for(monkeypatch):
    class Ending(Prefetcher):
        def _produce(self):
            for step in (7, 8):
                self._step = step
                self._ready.append(step) if step == 7 else None

    monkeypatch.setattr(loader, "_LOOK_SECONDS", 0.01)
    with Ending(lambda step: step, 7, 100) as batches:
        assert next(batches) == 7
        with pytest.raises(LoaderError, match=r"^step 8: its batch was not made: the loader's thread has ended$"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)


def test_close_ends_a_thread_that_waits_for_room():
    batches = Prefetcher(lambda step: step, 0, 10**9)
    next(batches)
    batches.close()
    batches.close()
    assert not batches._thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        next(batches)


def test_leaving_by_an_exception_closes():
    with pytest.raises(ZeroDivisionError), Prefetcher(lambda step: step, 0, 10**9) as batches:
        raise ZeroDivisionError
    assert not batches._thread.is_alive()


def test_close_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(loader, "_JOIN_SECONDS", 0.05)
    release = threading.Event()
    batches = Prefetcher(lambda step: release.wait(), 0, 5)
    closer = threading.Thread(target=batches.close, daemon=True)
    closer.start()
    closer.join(5)
    assert not closer.is_alive() and batches._thread.is_alive() and batches._thread.daemon
    release.set()
    batches._thread.join(5)
    assert not batches._thread.is_alive()


def test_close_wakes_a_consumer_that_waits():
    release = threading.Event()
    batches = Prefetcher(lambda step: release.wait(), 0, 5)
    seen = []

    def consume():
        try:
            next(batches)
        except RuntimeError as error:
            seen.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    time.sleep(0.02)
    threading.Timer(0.02, release.set).start()
    batches.close()
    consumer.join(5)
    assert not consumer.is_alive() and len(seen) <= 1


def test_depth_must_be_positive():
    with pytest.raises(ValueError):
        Prefetcher(lambda step: step, 0, 1, 0)
