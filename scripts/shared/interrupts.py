"""Signals that end a training run: after its step, or at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SAID = b"\nfinishing this step, then writing a checkpoint (Ctrl-C again stops at once)\n"


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP, as on Ctrl-C."""
    before = {s: signal.signal(s, signal.default_int_handler) for s in stop_signals() if s != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that end a run after its step. Under nohup SIGHUP is ignored, and stays so."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hang_up]


@contextmanager
def interrupts(told: bool = True) -> Iterator[threading.Event]:
    """Set the event on Ctrl-C, SIGTERM and SIGHUP; a second Ctrl-C raises KeyboardInterrupt. told: print on stderr."""
    flag, over = threading.Event(), threading.Event()

    def stop(signum: int, frame: object) -> None:
        if flag.is_set() and signum == signal.SIGINT:
            raise KeyboardInterrupt
        flag.set()
        if not told:
            return
        # Not through `print`: the signal may arrive during a call of it.
        with contextlib.suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), _SAID)

    before = {s: signal.signal(s, stop) for s in stop_signals()}
    # Ctrl-C and a closed terminal signal every process of the group. A C++ compiler of torch.compile would die and the
    # first step would fail. So this thread blocks both signals, which its children inherit, and another thread handles
    # them.
    threading.Thread(target=over.wait, name="lockstep-signals", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGHUP])
    try:
        yield flag
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGHUP])
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)
