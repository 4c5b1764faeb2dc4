"""Drawing the next token from logits: temperature, top-k, top-p, and one uniform number a token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from lockstep.core.errors import UserError

# Logits (V,) of the token that follows tokens, int32 (n,).
NextToken = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Sampling:
    """The settings by which a token is drawn.

    temperature: what logits are divided by; 0 takes the likeliest token. top_k: only the k likeliest; 0 = all (Fan et
    al. 2018). top_p: of those, the smallest set of the likeliest whose probabilities sum to p or more (Holtzman et al.
    2020, "nucleus"). seed: of the random numbers.

    Raises UserError for what is out of range.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(
                f"temperature = {self.temperature}: must be a number of at least 0; 0 = the likeliest token"
            )
        if self.top_k < 0:
            raise UserError(f"top_k = {self.top_k}: must be at least 0; 0 = all tokens")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p = {self.top_p}: must be above 0 and at most 1")
        if not 0 <= self.seed < 2**64:
            raise UserError(f"seed = {self.seed}: must be at least 0 and below 2^64")


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the probabilities to draw from: float64 (V,), 0 for tokens filtered out. Equal logits rank by their ids.

    softmax(logits / temperature), of it the top_k largest, normalised, of these the smallest set that reaches top_p,
    normalised. The temperature is not 0.
    """
    order = np.argsort(-logits, kind="stable")
    with np.errstate(over="ignore"):  # to −∞, under a temperature near 0
        ranked = np.exp((logits[order].astype(np.float64) - float(logits[order[0]])) / sampling.temperature)
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    reached = np.cumsum(ranked)
    ranked = ranked[: int(np.searchsorted(reached, sampling.top_p * reached[-1])) + 1]
    found = np.zeros(logits.shape)
    found[order[: len(ranked)]] = ranked / ranked.sum()
    return found


def choose(shares: np.ndarray, uniform: float) -> int:
    """Return the first id whose cumulative probability exceeds `uniform`, in [0, 1): the inverse distribution."""
    reached = np.cumsum(shares)
    # Rounded, the product may reach the sum.
    return min(int(np.searchsorted(reached, uniform * reached[-1], side="right")), int(np.flatnonzero(shares)[-1]))


def write_tokens(
    next_token: NextToken, prompt: np.ndarray, window: int, sampling: Sampling, number: int = 0, lead: int = 0
) -> Iterator[int]:
    """Yield tokens that follow `prompt`, int32 (n,) of at least one, without end; each is drawn from the last `window`.

    number: of the sample among several, each with a stream of its own (Philox keyed by seed and number; one number a
    token). lead: the prompt's first tokens that only the first draw sees. Raises UserError where logits are not finite.
    """
    draw = np.random.Generator(np.random.Philox(key=np.array([sampling.seed, number], np.uint64)))
    tokens = prompt.astype(np.int32)
    while True:
        logits = next_token(tokens[-window:])
        if not np.isfinite(logits).all():
            raise UserError("the model's logits are not finite: its weights, or what they overflow to, are no numbers")
        if sampling.temperature == 0:
            token = int(np.argmax(logits))
        else:
            token = choose(probabilities(logits, sampling), draw.random())
        yield token
        tokens, lead = np.append(tokens[lead:], np.int32(token)), 0
