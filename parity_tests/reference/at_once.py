"""A reference that computes a whole step from its own weights, and runs no single stages, or not all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lockstep.core.backend import NotSupported
from lockstep.core.config.schema import RunConfig
from lockstep.jax_backend.backend import JaxBackend


class AtOnce(JaxBackend):
    """The JAX reference without `run_stage`, or with one that refuses a stage.

    refused: the stage that it does not run; None: no stages at all.
    """

    def __init__(self, refused: str | None = None) -> None:
        self._refused = refused

    def open(self, config: RunConfig) -> Any:
        """Open a session without `run_stage`, or with one that raises NotSupported for the refused stage."""
        session: Any = super().open(config)
        if self._refused is None:
            shown = ("state", "load", "gradients", "observe", "close")
            return SimpleNamespace(**{name: getattr(session, name) for name in shown})
        run_stage = session.run_stage

        def refusing(stage: str, inputs: Any) -> Any:
            if stage == self._refused:
                raise NotSupported(f"no such stage: {stage}")
            return run_stage(stage, inputs)

        session.run_stage = refusing
        return session
