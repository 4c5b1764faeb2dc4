"""Compute the entropies that a model must beat: of tokens alone, and of tokens given the one before."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def unigram_entropy(tokens: NDArray[np.integer[Any]], vocab_size: int) -> float:
    """H(X) = -sum_x p(x) ln p(x) in nats, p being the share of x among `tokens`, shape (N,).

    This is the smallest mean loss of a model that predicts without looking (Shannon 1948).

    Raises:
        ValueError: no tokens, or one outside [0, vocab_size).
    """
    _check(tokens, vocab_size, at_least=1)
    return _entropy_of_counts(np.bincount(tokens, minlength=vocab_size))


def bigram_entropy(tokens: NDArray[np.integer[Any]], vocab_size: int) -> float:
    """H(X_t | X_{t-1}) = H(X_{t-1}, X_t) - H(X_{t-1}) in nats, over the N - 1 neighbours in `tokens`, shape (N,).

    This is the smallest mean loss of a model that looks at one token. As the counts are those of these very tokens,
    rare pairs make it lower than a model that never saw them could reach.

    Raises:
        ValueError: fewer than two tokens, or one outside [0, vocab_size).
    """
    _check(tokens, vocab_size, at_least=2)
    before = tokens[:-1].astype(np.int64)
    _, pairs = np.unique(before * vocab_size + tokens[1:], return_counts=True)
    # Rounding may leave -0.0 or a few ulp below zero where the next token is certain.
    return max(0.0, _entropy_of_counts(pairs) - _entropy_of_counts(np.bincount(before)))


def _check(tokens: NDArray[np.integer[Any]], vocab_size: int, *, at_least: int) -> None:
    if tokens.ndim != 1 or tokens.size < at_least:
        raise ValueError(f"entropy needs a vector of at least {at_least} tokens, this has shape {tokens.shape}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise ValueError(f"token ids must lie in [0, {vocab_size})")


def _entropy_of_counts(counts: NDArray[np.integer[Any]]) -> float:
    positive = counts[counts > 0].astype(np.float64)
    shares = positive / positive.sum()
    return float(-(shares * np.log(shares)).sum()) + 0.0
