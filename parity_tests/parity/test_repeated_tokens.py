"""A token that repeats counts once: a tie in it is one error, and a fault of it stays one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.core.config.schema import ModelConfig, PrecisionConfig, RunConfig
from lockstep.core.parity.measures.compare import Noise, Reference, compare, tokens_once
from lockstep.core.parity.measures.verdict import Finding

HIDDEN = 24
Sides = tuple[np.ndarray, np.ndarray, np.ndarray]


def rounded(x: np.ndarray) -> np.ndarray:
    """Round to the 11 bits of FP16's mantissa."""
    _, exponent = np.frexp(x)
    return np.ldexp(np.round(np.ldexp(x, 11 - exponent)), exponent - 11)


@pytest.fixture
def sides() -> Sides:
    """Two sequences of 64 tokens, half of which are one and the same; candidate and twin are equal."""
    truth = np.random.default_rng(0).standard_normal((2, 64, HIDDEN))
    truth[:, 32:] = truth[0, 0]
    truth[:, 32:, 5] = 3.0 + 0.4999 * 2.0**-9  # a hair from a tie
    twin = rounded(truth)
    return twin.copy(), twin, truth


def judged(sides: Sides, **options: Any) -> Finding:
    config = RunConfig(device="cpu", model=ModelConfig(), precision=PrecisionConfig(policy="fp16"))
    session: Any = None
    reference = Reference(config, session, session)
    return compare(reference, "up", "forward/up", "blocks.0.mlp.up", "local", *sides, **options)


def test_a_tie_of_a_token_that_repeats_is_one_error(sides: Sides) -> None:
    candidate, twin, truth = sides
    candidate[:, 32:, 5] += 2.0**-9
    assert judged(sides).ok
    # Other tokens, though their error is the same, are as many errors.
    truth[:, 32:, :4] += np.random.default_rng(1).standard_normal((2, 32, 4))
    twin[:] = rounded(truth)
    candidate[:] = twin
    candidate[:, 32:, 5] += 2.0**-9
    assert not judged(sides).ok


@pytest.mark.parametrize("fault", ["scaled", "once", "an element", "a column"])
def test_what_is_wrong_in_a_token_that_repeats_is_seen(sides: Sides, fault: str) -> None:
    candidate = sides[0]
    if fault == "scaled":
        candidate[:, 32:] *= 1.01
    elif fault == "once":  # one of the repetitions alone
        candidate[1, 40] *= 1.01
    elif fault == "an element":
        candidate[:, 32:, 3] += 0.01
    else:
        candidate[..., 7] += 0.002
    assert not judged(sides).ok


def test_tokens_are_told_apart_by_both_sides(sides: Sides) -> None:
    candidate, twin, _ = sides
    first = tokens_once(candidate, twin)
    assert first is not None and [*first] == [*range(33), *range(64, 96)]
    candidate[1, 63, 0] += 1
    again = tokens_once(candidate, twin)
    assert again is not None and [*again] == [*first, 127]
    assert tokens_once(candidate[:, :32], twin[:, :32]) is None
    assert tokens_once(candidate[0], twin[0]) is None  # the rows of a matrix are no tokens


def test_noise_is_that_of_the_tokens_that_are_held(sides: Sides) -> None:
    """Noise that a repeated token has in plenty excuses nothing in the others."""
    asked: list[np.ndarray | None] = []

    class OfTokens(Noise):
        def __init__(self) -> None:
            self._responses, self._spare = [({"out": sides[1]}, {"out": sides[1]})], None

        def of(self, name: str, terms: int = 1, tokens: np.ndarray | None = None) -> Any:
            asked.append(tokens)
            return super().of(name, terms, tokens)

    sides[0][0, 3] *= 1.01
    noise = OfTokens()
    assert not judged(sides, noise=lambda tokens=None: noise.of("out", 1, tokens)).ok
    of_all, of_first = asked
    assert of_all is None and of_first is not None and [*of_first] == [*range(33), *range(64, 96)]
