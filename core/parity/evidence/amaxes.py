"""Gather the amaxes that passes observed under FP8's delayed scaling."""

from __future__ import annotations

from lockstep.core.backend import Arrays, NotSupported, Session
from lockstep.core.capabilities import ShowsAmaxes, ShowsAmaxesOfParts, ShowsAmaxesOfTaps, ask
from lockstep.core.config.schema import RunConfig
from lockstep.core.train.fp8_amax import layers


def amaxes_of_pass(session: Session, config: RunConfig, missing: list[str]) -> Arrays:
    """Return the amaxes of the last pass by layer, (3,) each.

    Empty without delayed scaling, or if the session shows none. missing: receives the reason.
    """
    if not layers(config):
        return {}
    try:
        return ask(session, ShowsAmaxes).amaxes_of_pass()
    except NotSupported as reason:
        missing.append(f"the amaxes of a micro-batch against its tensors: {reason}")
        return {}


def amaxes_of_taps(session: Session, config: RunConfig) -> Arrays:
    """Return the amaxes of the program that showed the taps; empty if the session shows none."""
    if not layers(config):
        return {}
    try:
        return ask(session, ShowsAmaxesOfTaps).amaxes_of_taps()
    except NotSupported:
        return {}


def amaxes_of_parts(session: Session, config: RunConfig) -> tuple[Arrays, ...]:
    """Return the amaxes of each micro-batch of the last step; empty if the session shows none."""
    if not layers(config):
        return ()
    try:
        return tuple(ask(session, ShowsAmaxesOfParts).amaxes_of_parts())
    except NotSupported:
        return ()
