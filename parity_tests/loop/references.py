"""References that are slow, fail or are wrong. The worker imports them by name; only those that use JAX load it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lockstep.core.backend import Session
from lockstep.core.config.schema import RunConfig

# Longer than the steps of a test take on any machine: if the trainer waited for this reference, the test would fail.
LATE_SECONDS = 600.0


class Late:
    """A reference that takes LATE_SECONDS to open."""

    name = "late"

    def open(self, config: RunConfig) -> Session:
        time.sleep(LATE_SECONDS)
        raise AssertionError("nobody waits for this")


class Failing:
    """A reference whose `open` raises an error with a message of two lines."""

    name = "failing"

    def open(self, config: RunConfig) -> Session:
        raise RuntimeError("no such luck\nand a second line")


class Ending:
    """A reference whose `open` ends the process."""

    name = "ending"

    def open(self, config: RunConfig) -> Session:
        raise SystemExit(7)


def wrong() -> Any:
    """Return the reference with a wrong epsilon in its norms, which the self-check's closed forms detect."""
    return _with_other_epsilon(lambda config: True)


def wrong_of_this_run() -> Any:
    """Return a reference that is wrong only at the width of the tests' runs, so its self-check passes."""
    return _with_other_epsilon(lambda config: config.model.hidden == 64)


def _with_other_epsilon(there: Callable[[RunConfig], bool]) -> Any:
    from lockstep.jax_backend.backend import JaxBackend

    class Wrong(JaxBackend):
        def open(self, config: RunConfig) -> Any:
            if not there(config):
                return super().open(config)
            model = config.model.model_copy(update={"norm_eps": 1e-2})
            return super().open(config.model_copy(update={"model": model}))

    return Wrong()
