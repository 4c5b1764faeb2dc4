"""Gather logits as sampling computes them: token by token with cached keys and values, or without a cache."""

from __future__ import annotations

import numpy as np

from lockstep.core.backend import Arrays, Batch, NotSupported, Session
from lockstep.core.capabilities import Decodes, KeepsKeys, Samples, ask, ranks_of
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence.evaluation import LOGITS

# Names of the logits, and of the number of tokens before each. The first pair is for the end of the sequence.
CACHED, LENGTHS = "cached", "lengths"
# The other pairs: from the first token, from a drawn one, with a cache that has served another prompt, without a cache.
FROM_START = "cached_from_start", "lengths_from_start"
FROM_DRAWN = "cached_from_drawn", "lengths_from_drawn"
SECOND = "cached_second_prompt", "lengths_second_prompt"
UNCACHED = "uncached", "lengths_uncached"
# Number of tokens that are computed one at a time, after a prompt of all but these, of one token, or of a drawn number
# of tokens. After the drawn prompt they are as many as a page of a paged cache holds, so the first place of a page is
# among them.
ALONE, ALONE_FROM_START, ALONE_FROM_DRAWN, ALONE_SECOND = 3, 8, 16, 3
# Rows of logits of a long sequence. The last two are without a cache.
LOGITS_MADE = ALONE + ALONE_FROM_START + ALONE_FROM_DRAWN + ALONE_SECOND + 4 + 2


def sampled_logits(session: Session, config: RunConfig, tapped: Batch, taps: Arrays, missing: list[str]) -> Arrays:
    """Return logits (n, V) after the first tokens of a sequence, and the counts of those tokens, int32 (n,).

    The sequence is the first one of `tapped` with weight, or its first document if attention uses documents. A fault of
    a cache may depend on a short prompt, on the number of tokens, on the first place of a page, or on an earlier
    prompt. So decoding starts at several places, of which the digest of the micro-batch draws one, and the cache serves
    a second prompt.
    taps: taps of the candidate. Without logits among them there is nothing to compare with.
    missing: receives what is not computed.
    """
    # All ranks compute if weights are sharded, but only rank 0 has taps.
    if not ranks_of(session).of_first(lambda: LOGITS in taps, "`sample`"):
        missing.append("sampling: the session shows no logits")
        return {}
    row = int(np.flatnonzero(tapped.weights.any(axis=1))[0])
    tokens = tapped.tokens[row]
    documents = tapped.documents_for(config.attention)
    if documents is not None:
        tokens = tokens[documents[row] == documents[row, 0]]
    if len(tokens) <= ALONE:
        missing.append(f"sampling: the sequence's first document has {len(tokens)} tokens")
        return {}
    drawn = int(tapped.digest()[:8], 16)
    found: dict[str, np.ndarray] = {}
    for make, what in ((_cached, ""), (_second_prompt, " of a second prompt"), (_uncached, " without a cache")):
        try:
            found |= make(session, config, tokens, drawn)
        except NotSupported as reason:
            missing.append(f"sampling{what}: {reason}")
    return found


def _cached(session: Session, config: RunConfig, tokens: np.ndarray, drawn: int) -> dict[str, np.ndarray]:
    """Return the logits of a cache that is new at each of three places."""
    asked, most = ask(session, KeepsKeys), len(tokens)
    places = (
        ((CACHED, LENGTHS), most - ALONE, ALONE),
        (FROM_START, 1, ALONE_FROM_START),
        (FROM_DRAWN, 1 + drawn % max(most - ALONE_FROM_DRAWN, 1), ALONE_FROM_DRAWN),
    )
    found = {}
    for (logits, of), first, alone in places:
        found[of] = _lengths(first, alone, most)
        found[logits] = np.asarray(asked.cached_logits(tokens, found[of]))
    return found


def _second_prompt(session: Session, config: RunConfig, tokens: np.ndarray, drawn: int) -> dict[str, np.ndarray]:
    """Return the logits of a cache after another prompt of the sequence's length: its tokens in reverse order."""
    decode, (logits, of) = ask(session, Decodes).decoder(), SECOND
    lengths = _lengths(2 + drawn % max(len(tokens) - ALONE_SECOND - 1, 1), ALONE_SECOND, len(tokens))
    decode(tokens[::-1].copy())
    return {logits: np.stack([decode(tokens[:length]) for length in lengths]), of: lengths}


def _uncached(session: Session, config: RunConfig, tokens: np.ndarray, drawn: int) -> dict[str, np.ndarray]:
    """Return logits as a run's samples use them (`log.sample_every`), after a drawn part and after the whole text."""
    if config.precision.couples_sequences:
        raise NotSupported("FP8's scales belong to all tokens of a micro-batch at once")
    asked, (logits, of) = ask(session, Samples), UNCACHED
    lengths = np.asarray([1 + drawn % (len(tokens) - 1), len(tokens)], np.int32)
    return {logits: np.stack([asked.next_token_logits(tokens[:length]) for length in lengths]), of: lengths}


def _lengths(first: int, alone: int, most: int) -> np.ndarray:
    return np.arange(first, min(first + alone, most) + 1, dtype=np.int32)
