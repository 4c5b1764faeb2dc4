"""Gather logits that a candidate makes as sampling does: of a token at a time, with the keys and values kept."""

from __future__ import annotations

import numpy as np

from lockstep.core.backend import Arrays, Batch, NotSupported, Session
from lockstep.core.capabilities import KeepsKeys, ask
from lockstep.core.config.schema import AttentionConfig
from lockstep.core.parity.evidence.evaluation import LOGITS

CACHED, LENGTHS = "cached", "lengths"
# Tokens that are computed alone, behind those that are computed together.
ALONE = 3


def cached_logits(
    session: Session, tapped: Batch, taps: Arrays, attention: AttentionConfig, missing: list[str]
) -> Arrays:
    """Return `cached` logits (ALONE + 1, V) of the token that follows the first n tokens, and the `lengths` n.

    They are of the first sequence of `tapped` that has weight, or its first document, where attention asks for them.
    `missing` gets why there are none. taps: the candidate's: without logits there is nothing to hold these to.
    """
    if LOGITS not in taps:
        missing.append("sampling: the session shows no logits")
        return {}
    row = int(np.flatnonzero(tapped.weights.any(axis=1))[0])
    tokens = tapped.tokens[row]
    documents = tapped.documents_for(attention)
    if documents is not None:
        tokens = tokens[documents[row] == documents[row, 0]]
    if len(tokens) <= ALONE:
        missing.append(f"sampling: the sequence's first document has {len(tokens)} tokens")
        return {}
    lengths = np.arange(len(tokens) - ALONE, len(tokens) + 1, dtype=np.int32)
    try:
        asked = ask(session, KeepsKeys)
        return {CACHED: np.asarray(asked.cached_logits(tokens, lengths)), LENGTHS: lengths}
    except NotSupported as reason:
        missing.append(f"sampling: {reason}")
        return {}
