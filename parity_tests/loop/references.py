"""References that are late, fail or are wrong. The worker imports them by name; JAX is loaded only where it is used."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lockstep.core.backend import Session
from lockstep.core.config.schema import RunConfig

# Longer than any machine takes for the steps of a test: a trainer that waited would show that this reference failed.
LATE_SECONDS = 600.0


class Late:
    """Takes its time to open."""

    name = "late"

    def open(self, config: RunConfig) -> Session:
        time.sleep(LATE_SECONDS)
        raise AssertionError("nobody waits for this")


class Failing:
    """Does not open, and gives the reason in two lines."""

    name = "failing"

    def open(self, config: RunConfig) -> Session:
        raise RuntimeError("no such luck\nand a second line")


class Ending:
    """Ends its process."""

    name = "ending"

    def open(self, config: RunConfig) -> Session:
        raise SystemExit(7)


def wrong() -> Any:
    """Return the reference with another epsilon than the run's in its norms, which closed forms detect."""
    return _with_other_epsilon(lambda config: True)


def wrong_of_this_run() -> Any:
    """Return one that is wrong only in models as wide as the tests' runs; the small one of the self-check is right."""
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
