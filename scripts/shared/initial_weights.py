"""Runs whose initial weights follow from no seed."""

from __future__ import annotations

from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError


def require_seed(config: RunConfig) -> None:
    """Raise UserError unless a command that begins from a run file can make its initial weights."""
    if config.initial == "imported":
        raise UserError(
            "initial = 'imported': a run file holds no weights; lockstep import PATH RUN makes a run that does, and "
            "lockstep train --resume RUN goes on with it"
        )
