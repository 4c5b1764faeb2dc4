"""The loss against closed forms: a head of zeros predicts every token alike, and its gradient can be written down."""

import math

import jax
import numpy as np
import pytest

from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.jax_backend.backend import JaxBackend
from lockstep.jax_backend.loss import negative_log_likelihood
from lockstep.parity_tests.cross.variants import fresh_state
from lockstep.parity_tests.tiny import text_batch, tiny_config

VOCAB = 250


@pytest.fixture(scope="module")
def blind():
    """Return a session whose head is zero, a batch, and its gradients."""
    config = tiny_config(
        "fp64", train={"sequence_length": 16, "micro_batch_size": 4}, tied=False, vocab_size=VOCAB, layers=1
    )
    text = text_batch(config)
    batch = uneven_weights(type(text)(text.tokens % VOCAB, text.targets % VOCAB, text.weights), 0)
    session = JaxBackend().open(config)
    params = dict(session.state().params)
    params["lm_head.weight"] = np.zeros_like(params["lm_head.weight"])
    session.load(fresh_state(params))
    return session, batch, session.gradients(batch)


def test_a_head_of_zeros_costs_ln_v(blind):
    _, _, found = blind
    assert (found.nll == math.log(VOCAB)).all()
    assert found.loss == pytest.approx(math.log(VOCAB), rel=1e-15)


def test_nothing_flows_back_through_a_head_of_zeros(blind):
    _, _, found = blind
    assert all((g == 0).all() for name, g in found.grads.items() if name != "lm_head.weight")


def test_the_gradient_of_a_head_of_zeros(blind):
    """Σ over tokens of weight/Σweight · (1/V − [v is the target]) · x."""
    session, batch, found = blind
    x = session.observe(batch, ["final_norm"])["final_norm"]
    error = np.full((*batch.targets.shape, VOCAB), 1.0 / VOCAB) - np.eye(VOCAB)[batch.targets]
    share = batch.weights.astype(np.float64) / batch.weights.sum(dtype=np.float64)
    expected = np.einsum("bs,bsv,bsd->vd", share, error, x)
    np.testing.assert_allclose(found.grads["lm_head.weight"], expected, rtol=0, atol=1e-15 * np.abs(expected).max() * 8)


def test_the_loss_is_the_weighted_mean_of_the_nll(blind):
    session, batch, _ = blind
    session = JaxBackend().open(session.config)
    found = session.gradients(batch)
    weights = batch.weights.astype(np.float64)
    assert np.ptp(found.nll) > 0.1
    assert found.loss == pytest.approx((weights * found.nll).sum() / weights.sum(), rel=1e-14)
    assert abs(found.loss - found.nll.mean()) > 1e-4


def test_nll_of_logits_that_can_be_worked_out():
    """Logits ln 1, ln 2, ln 3: probabilities 1/6, 1/3, 1/2. And a logit of 10,000 does not overflow."""
    logits = np.log([[[1.0, 2.0, 3.0]] * 3])
    nll = np.array(jax.jit(negative_log_likelihood)(logits, np.array([[0, 1, 2]])))
    np.testing.assert_allclose(nll, [[math.log(6), math.log(3), math.log(2)]], rtol=1e-15)
    huge = np.array([[[1e4, 0.0, 0.0]] * 2])
    assert np.array(jax.jit(negative_log_likelihood)(huge, np.array([[0, 1]]))).tolist() == [[0.0, 1e4]]
