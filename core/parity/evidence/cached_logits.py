"""Gather logits that a candidate makes as sampling does: of a token at a time, with the keys and values kept."""

from __future__ import annotations

import numpy as np

from lockstep.core.backend import Arrays, Batch, NotSupported, Session
from lockstep.core.capabilities import KeepsKeys, ask
from lockstep.core.config.schema import AttentionConfig
from lockstep.core.parity.evidence.evaluation import LOGITS

CACHED, LENGTHS = "cached", "lengths"
# The same from the first token on.
FROM_START = "cached_from_start", "lengths_from_start"
# Tokens that are computed alone, behind those that are computed together: all but these, or one.
ALONE, ALONE_FROM_START = 3, 8


def cached_logits(
    session: Session, tapped: Batch, taps: Arrays, attention: AttentionConfig, missing: list[str]
) -> Arrays:
    """Return `cached` logits (ALONE + 1, V) of the token that follows the first n tokens, and the `lengths` n.

    They are of the first sequence of `tapped` that has weight, or its first document, where attention asks for them.
    And those of FROM_START, where the cache begins with a single token: what is wrong in the fifth token that is
    computed alone, or behind a short prompt, is right in the third behind a long one.
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
    last = np.arange(len(tokens) - ALONE, len(tokens) + 1, dtype=np.int32)
    first = np.arange(1, 1 + min(len(tokens), ALONE_FROM_START + 1), dtype=np.int32)
    try:
        asked = ask(session, KeepsKeys)
        return {
            name: array
            for (logits, of), lengths in (((CACHED, LENGTHS), last), (FROM_START, first))
            for name, array in ((logits, np.asarray(asked.cached_logits(tokens, lengths))), (of, lengths))
        }
    except NotSupported as reason:
        missing.append(f"sampling: {reason}")
        return {}
