"""The entropies against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lockstep.core.data.entropy import bigram_entropy, unigram_entropy


def test_uniform_tokens():
    tokens = np.tile(np.arange(8, dtype=np.uint16), 100)
    assert unigram_entropy(tokens, 8) == pytest.approx(math.log(8), rel=1e-12)


def test_one_token_is_certain():
    tokens = np.full(10, 3, dtype=np.uint16)
    assert unigram_entropy(tokens, 4) == 0.0
    assert bigram_entropy(tokens, 4) == 0.0


def test_a_biased_coin():
    tokens = np.array([0] * 3 + [1], dtype=np.int32)
    assert unigram_entropy(tokens, 2) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), rel=1e-12)


def test_a_cycle_is_certain_given_the_token_before():
    tokens = np.tile(np.arange(5, dtype=np.uint16), 40)
    assert bigram_entropy(tokens, 5) == pytest.approx(0.0, abs=1e-12)
    assert unigram_entropy(tokens, 5) > 1.6


def test_a_markov_chain_by_hand():
    # After 0 come 1 and 2 alike; after 1 and 2 comes 0. Half of the neighbours start at 0: H = 1/2 ln 2.
    tokens = np.array([0, 1, 0, 2] * 50 + [0], dtype=np.uint16)
    assert bigram_entropy(tokens, 3) == pytest.approx(0.5 * math.log(2), rel=1e-12)


def test_large_ids_do_not_overflow():
    # In the tokens' own 16 bits, before * vocab_size wraps and 0 -> 1 becomes one with 2**15 -> 1.
    tokens = np.array([0, 1, 2**15, 1, 2**15, 2, 0, 2], dtype=np.uint16)
    small = np.array([0, 1, 3, 1, 3, 2, 0, 2], dtype=np.uint16)
    assert bigram_entropy(tokens, 65_536) == pytest.approx(bigram_entropy(small, 4), rel=1e-12)


def test_independent_tokens_gain_nothing():
    tokens = np.random.default_rng(0).integers(0, 4, 200_000)
    assert bigram_entropy(tokens, 4) == pytest.approx(unigram_entropy(tokens, 4), abs=1e-3)


@pytest.mark.parametrize("tokens", [np.array([], dtype=int), np.array([[1, 2]]), np.array([0, 9]), np.array([-1, 0])])
def test_what_is_no_token_stream_is_refused(tokens):
    for entropy in (unigram_entropy, bigram_entropy):
        with pytest.raises(ValueError):
            entropy(tokens, 4)
