"""Drawing a token: the filters against plain versions of themselves, and the draws against their distribution."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep.core.sampling.draw
from lockstep.core.errors import UserError
from lockstep.core.sampling.draw import Sampling, choose, probabilities, write_tokens

# Few values, so that there are ties.
LOGITS = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 1.0, 2.0, 7.0]), min_size=1, max_size=12)


def plain(logits: list[float], sampling: Sampling) -> list[float]:
    """One token after the other, in Python's own numbers."""
    most = max(logits)
    weight = {i: math.exp((x - most) / sampling.temperature) for i, x in enumerate(logits)}
    ranked = sorted(weight, key=lambda i: (-logits[i], i))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    total = math.fsum(weight[i] for i in ranked)
    kept: list[int] = []
    for i in ranked:
        kept.append(i)
        if math.fsum(weight[j] for j in kept) >= sampling.top_p * total:
            break
    total = math.fsum(weight[i] for i in kept)
    return [weight[i] / total if i in kept else 0.0 for i in range(len(logits))]


def differs(logits: list[float], sampling: Sampling) -> bool:
    """Return whether the distribution drawn from is not the plain version's.

    Where a sum is within rounding of top_p, either side of it is right.
    """
    due, found = plain(logits, sampling), probabilities(np.array(logits, np.float32), sampling)
    return not np.allclose(found, due, rtol=1e-12, atol=0)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    LOGITS, st.sampled_from([0.3, 0.8, 1.0, 2.5]), st.integers(0, 13), st.sampled_from([1e-9, 0.31, 0.5, 0.77, 0.93])
)
def test_the_filters_do_what_they_say(logits, temperature, top_k, top_p):
    assert not differs(logits, Sampling(temperature, top_k, top_p))


CASES = [([0.0, 2.0, 1.0, 2.0], Sampling(1.0, 0, p)) for p in (0.2, 0.4, 0.7, 0.85, 0.95, 1.0)]


def test_dropping_the_token_that_crosses_p_is_noticed(monkeypatch):
    searchsorted = np.searchsorted

    class Shifted:
        def __getattr__(self, name):
            return getattr(np, name)

        def searchsorted(self, reached, value):
            return max(int(searchsorted(reached, value)) - 1, 0)

    assert not any(differs(*case) for case in CASES)
    monkeypatch.setattr(lockstep.core.sampling.draw, "np", Shifted())
    assert any(differs(*case) for case in CASES)


@pytest.mark.parametrize("sampling", [Sampling(1.0, 2), Sampling(1.0, 0, 0.6)])
def test_ties_are_kept_by_id(sampling):
    assert np.flatnonzero(probabilities(np.array([1.0, 3.0, 3.0, 3.0, 1.0]), sampling)).tolist() == [1, 2]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e308])
def test_absurd_temperatures_leave_a_distribution(temperature):
    found = probabilities(np.array([0.0, 5.0, 1.0], np.float32), Sampling(temperature))
    assert found.sum() == pytest.approx(1) and (found[1] == 1 if temperature < 1 else np.ptp(found) < 1e-12)


def test_a_draw_is_the_inverse_of_the_distribution():
    shares = np.array([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    assert [choose(shares, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, np.nextafter(1, 0))] == [1, 1, 3, 3, 4, 4]
    counts = np.bincount([choose(shares, u) for u in np.random.default_rng(0).random(4000)], minlength=6) / 4000
    # Five standard deviations of a share of 4,000 draws.
    assert np.abs(counts - shares).max() <= 5 * 0.5 / math.sqrt(4000)


def steady(tokens):
    return np.sin(np.arange(50) * (1 + int(tokens.sum()))).astype(np.float32)


def drawn(sampling, number=0, count=20, window=8, lead=0, seen=None, prompt=(1, 2)):
    def ask(tokens):
        if seen is not None:
            seen.append(tokens.tolist())
        return steady(tokens)

    return list(islice(write_tokens(ask, np.array(prompt, np.int32), window, sampling, number, lead), count))


def test_a_seed_is_a_text_and_samples_have_draws_of_their_own():
    assert drawn(Sampling(seed=5)) == drawn(Sampling(seed=5))
    texts = [drawn(Sampling(seed=s), n) for s, n in ((5, 0), (5, 1), (6, 0), (2**64 - 1, 0))]
    assert all(a != b for i, a in enumerate(texts) for b in texts[:i])


def test_no_temperature_takes_the_likeliest_whatever_the_seed():
    assert drawn(Sampling(0.0, seed=1)) == drawn(Sampling(0.0, 3, 0.5, seed=2))
    assert drawn(Sampling(0.0), count=1) == [int(steady(np.array([1, 2])).argmax())]


def test_the_last_window_is_seen_and_a_lead_only_once():
    seen: list[list[int]] = []
    found = drawn(Sampling(), count=5, window=3, lead=1, seen=seen)
    whole = [1, 2, *found]
    assert seen == [whole[:2], whole[1:3], whole[1:4], whole[2:5], whole[3:6]]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": -0.1}, "temperature = -0.1: must be a number of at least 0"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"temperature": math.inf}, "temperature = inf"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_p": 0.0}, "top_p = 0.0: must be above 0"),
        ({"top_p": 1.1}, "top_p = 1.1"),
        ({"top_p": math.nan}, "top_p = nan"),
        ({"seed": -1}, "seed = -1"),
        ({"seed": 2**64}, "seed = 18446744073709551616"),
    ],
)
def test_what_is_out_of_range(values, said):
    with pytest.raises(UserError) as error:
        Sampling(**values)
    assert said in str(error.value)


def test_logits_that_are_no_numbers():
    with pytest.raises(UserError, match="not finite"):
        next(write_tokens(lambda tokens: np.array([0.0, np.nan]), np.array([1], np.int32), 4, Sampling()))
