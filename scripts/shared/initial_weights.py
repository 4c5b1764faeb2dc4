"""Runs whose initial weights do not follow from the seed."""

from __future__ import annotations

from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError


def require_seed(config: RunConfig) -> None:
    """Raise UserError unless a command that begins from a run file can make its initial weights."""
    if config.initial == "imported":
        raise UserError(
            "initial = 'imported': a run file holds no weights; make a run with lockstep import PATH RUN, and "
            "train it with lockstep train --resume RUN"
        )
