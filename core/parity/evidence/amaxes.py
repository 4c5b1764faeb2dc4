"""Gather the amaxes that passes saw under FP8's delayed scaling."""

from __future__ import annotations

from lockstep.core.backend import Arrays, NotSupported, Session
from lockstep.core.capabilities import ShowsAmaxes, ShowsAmaxesOfParts, ShowsAmaxesOfTaps, ask
from lockstep.core.config.schema import RunConfig
from lockstep.core.train.fp8_amax import layers


def amaxes_of_pass(session: Session, config: RunConfig, missing: list[str]) -> Arrays:
    """Return what the pass before saw under FP8's delayed scaling; nothing where the session does not report it."""
    if not layers(config):
        return {}
    try:
        return ask(session, ShowsAmaxes).amaxes_of_pass()
    except NotSupported as reason:
        missing.append(f"the amaxes of a micro-batch against its tensors: {reason}")
        return {}


def amaxes_of_taps(session: Session, config: RunConfig) -> Arrays:
    """Return what the program that showed taps saw; nothing where the session does not report it."""
    if not layers(config):
        return {}
    try:
        return ask(session, ShowsAmaxesOfTaps).amaxes_of_taps()
    except NotSupported:
        return {}


def amaxes_of_parts(session: Session, config: RunConfig) -> tuple[Arrays, ...]:
    """Return what each micro-batch of the step before saw in it; nothing where the session does not report it."""
    if not layers(config):
        return ()
    try:
        return tuple(ask(session, ShowsAmaxesOfParts).amaxes_of_parts())
    except NotSupported:
        return ()
