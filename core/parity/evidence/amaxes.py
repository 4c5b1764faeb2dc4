"""Ask what passes saw under FP8's delayed scaling."""

from __future__ import annotations

from lockstep.core.backend import Arrays, NotSupported, Session
from lockstep.core.capabilities import ShowsAmaxes, ask
from lockstep.core.config.schema import RunConfig
from lockstep.core.train.fp8_amax import layers


def amaxes_of_pass(session: Session, config: RunConfig, missing: list[str]) -> Arrays:
    """Return what the pass before saw under FP8's delayed scaling; nothing where the session does not tell."""
    if not layers(config):
        return {}
    try:
        return ask(session, ShowsAmaxes).amaxes_of_pass()
    except NotSupported as reason:
        missing.append(f"the amaxes of a micro-batch against its tensors: {reason}")
        return {}
