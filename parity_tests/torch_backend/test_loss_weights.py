"""A target of weight 0 teaches nothing; one of weight ½ teaches half."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.core.backend import Batch
from lockstep.parity_tests.cross.variants import relative
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend

CONFIG = tiny_config("fp64", train={"sequence_length": 32})
TEXT = text_batch(CONFIG)
MASKED = (slice(1, 3), slice(10, 20))


@pytest.fixture(scope="module")
def session():
    return TorchBackend().open(CONFIG)


def weighted(weight, targets=TEXT.targets, tokens=TEXT.tokens):
    weights = TEXT.weights.copy()
    weights[MASKED] = weight
    return Batch(tokens, targets, weights)


def other_targets():
    targets = TEXT.targets.copy()
    targets[MASKED] ^= 1
    return targets


def equal(a, b):
    return a.loss == b.loss and all(np.array_equal(a.grads[name], b.grads[name]) for name in b.grads)


def test_a_masked_target_may_be_anything(session):
    a, b = (session.gradients(weighted(0.0, targets)) for targets in (TEXT.targets, other_targets()))
    assert not np.array_equal(a.nll[MASKED], b.nll[MASKED])
    assert equal(a, b)


@pytest.mark.parametrize("weight", [1.0, 2.0**-20])
def test_one_that_is_not_masked_may_not(session, weight):
    """The negative twin."""
    assert not equal(*(session.gradients(weighted(weight, t)) for t in (TEXT.targets, other_targets())))


def test_a_sequence_without_weight_may_be_anything(session):
    weights = TEXT.weights.copy()
    weights[1] = 0.0
    tokens = TEXT.tokens.copy()
    tokens[1] = tokens[1, ::-1]
    assert equal(*(session.gradients(Batch(t, TEXT.targets, weights)) for t in (TEXT.tokens, tokens)))


def test_gradients_are_linear_in_the_weights(session):
    """Σweight · gradient at weight ½ lies half-way between those at weights 0 and 1."""
    none, half, full = (
        {n: g * batch.weights.sum(dtype=np.float64) for n, g in session.gradients(batch).grads.items()}
        for batch in (weighted(0.0), weighted(0.5), weighted(1.0))
    )
    for name in full:
        assert relative(full[name], none[name]) > 0.01
        assert relative((none[name] + full[name]) / 2, half[name]) < 1e-13, name
