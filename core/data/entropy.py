"""Entropies of a text, as baselines of a model's loss: of single tokens, and of tokens given the token before."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK_TOKENS = 1 << 21


class TokenCounts:
    """Counts of tokens and of neighbouring pairs in a text. Memory grows with distinct pairs, not with tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.tokens = 0
        self._vocab_size = vocab_size
        self._of_token = np.zeros(vocab_size, dtype=np.int64)
        # Pairs, each as one number, ascending, and their counts.
        self._pairs, self._of_pair = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        self._last: NDArray[np.integer[Any]] | None = None

    def add(self, tokens: NDArray[np.integer[Any]]) -> None:
        """Add tokens, shape (N,), that follow those added before. Raises ValueError for an id out of range."""
        for first in range(0, tokens.size, _BLOCK_TOKENS):
            block = tokens[first : first + _BLOCK_TOKENS]
            if int(block.min()) < 0 or int(block.max()) >= self._vocab_size:
                raise ValueError(f"token ids must lie in [0, {self._vocab_size})")
            self._of_token += np.bincount(block, minlength=self._vocab_size)
            self._add_pairs(block if self._last is None else np.concatenate([self._last, block]))
            self._last = block[-1:]
            self.tokens += block.size

    def _add_pairs(self, tokens: NDArray[np.integer[Any]]) -> None:
        pairs, counts = np.unique(tokens[:-1].astype(np.int64) * self._vocab_size + tokens[1:], return_counts=True)
        both = np.concatenate([self._pairs, pairs])
        order = np.argsort(both, kind="stable")
        both = both[order]
        firsts = np.flatnonzero(np.append(True, both[1:] != both[:-1])) if both.size else order
        counts = np.concatenate([self._of_pair, counts])[order]
        self._pairs, self._of_pair = both[firsts], np.add.reduceat(counts, firsts) if both.size else counts

    def unigram_entropy(self) -> float:
        """Return H(X) = -sum_x p(x) ln p(x) in nats, where p(x) is the fraction of tokens that are x.

        This is the smallest mean loss of a model that ignores its input (Shannon 1948).

        Raises:
            ValueError: there are no tokens.
        """
        self._require(1)
        return _entropy_of_counts(self._of_token)

    def bigram_entropy(self) -> float:
        """Return H(X_t | X_{t-1}) = H(X_{t-1}, X_t) - H(X_{t-1}) in nats, over all neighbours.

        This is the smallest mean loss of a model that reads only the token before. The counts are those of the same
        tokens, so rare pairs make it lower than a model trained on other text can reach.

        Raises:
            ValueError: there are fewer than two tokens.
        """
        self._require(2)
        before = np.zeros(self._vocab_size, dtype=np.int64)
        np.add.at(before, self._pairs // self._vocab_size, self._of_pair)
        # If the next token is certain, rounding may give -0.0 or a few ulp below zero.
        return max(0.0, _entropy_of_counts(self._of_pair) - _entropy_of_counts(before))

    def _require(self, at_least: int) -> None:
        if self.tokens < at_least:
            raise ValueError(f"entropy needs at least {at_least} tokens, there are {self.tokens}")


def unigram_entropy(tokens: NDArray[np.integer[Any]], vocab_size: int) -> float:
    """Return `TokenCounts.unigram_entropy` of `tokens`, shape (N,). Raises ValueError as that method and `add` do."""
    return _counted(tokens, vocab_size).unigram_entropy()


def bigram_entropy(tokens: NDArray[np.integer[Any]], vocab_size: int) -> float:
    """Return `TokenCounts.bigram_entropy` of `tokens`, shape (N,). Raises ValueError as that method and `add` do."""
    return _counted(tokens, vocab_size).bigram_entropy()


def _counted(tokens: NDArray[np.integer[Any]], vocab_size: int) -> TokenCounts:
    if tokens.ndim != 1:
        raise ValueError(f"entropy needs a vector of tokens, this has shape {tokens.shape}")
    counts = TokenCounts(vocab_size)
    counts.add(tokens)
    return counts


def _entropy_of_counts(counts: NDArray[np.integer[Any]]) -> float:
    positive = counts[counts > 0].astype(np.float64)
    shares = positive / positive.sum()
    return float(-(shares * np.log(shares)).sum()) + 0.0
