"""Gather the largest attention logits of the examined sequences."""

from __future__ import annotations

import numpy as np

from lockstep.core.backend import Arrays, Batch, NotSupported, Session
from lockstep.core.capabilities import ShowsAttention, ask
from lockstep.core.config.schema import RunConfig

ATTENTION_LOGITS = "attention_logits"


def shown_attention_logits(session: Session, config: RunConfig, tapped: Batch, missing: list[str]) -> Arrays:
    """Return `attention_logits` (layers,), float64, of the sequences of `tapped` with weight; empty if there are none.

    missing: receives the reason.
    """
    try:
        if config.precision.couples_sequences:
            raise NotSupported("FP8's scales belong to all tokens of a micro-batch at once")
        rows = np.flatnonzero(tapped.weights.any(axis=1))
        shown = ask(session, ShowsAttention).attention_logits(tapped.rows(rows))
    except NotSupported as reason:
        missing.append(f"the largest attention logits: {reason}")
        return {}
    return {ATTENTION_LOGITS: np.asarray(shown, np.float64)}
