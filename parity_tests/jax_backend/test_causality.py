"""No position knows, or is taught by, what comes after it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.core.backend import Batch
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.tiny import text_batch, tiny_config

LENGTH = 8


@pytest.fixture(scope="module", params=["fp64", "bf16"])
def opened(request):
    config = tiny_config(request.param, train={"sequence_length": LENGTH, "batch_size": 1, "micro_batch_size": 1})
    return JaxBackend().open(config), text_batch(config)


def test_the_gradient_of_a_position_is_zero_at_later_positions(opened):
    """jacobian[t, s] = |d nll of t / d embedding at s|: exactly 0 for s > t, and not 0 up to t."""
    session, batch = opened
    params = session.params

    def nll(probe):
        def tap(name, value):
            return value + probe if name == "embed" else value

        return session.model(params, tap)(batch.tokens, batch.targets, session.policy)[0]

    probe = jnp.zeros((1, LENGTH, session.config.model.hidden), session.policy.stream)
    jacobian = np.abs(np.array(jax.jit(jax.jacrev(nll))(probe))).max((1, 3))
    earlier = np.tril(np.ones((LENGTH, LENGTH), bool))
    assert (jacobian[~earlier] == 0).all()
    assert (jacobian[earlier] > 0).all()


def test_a_later_token_changes_nothing_before_it(opened):
    session, batch = opened
    before = session.evaluate(batch)["nll"][0]
    for position in range(LENGTH):
        tokens = batch.tokens.copy()
        tokens[0, position] ^= 1
        after = session.evaluate(Batch(tokens, batch.targets, batch.weights))["nll"][0]
        assert np.array_equal(after[:position], before[:position])
        assert (after[position:] != before[position:]).all()


def test_sequences_of_a_batch_do_not_see_each_other(opened):
    session, batch = opened
    other = Batch(batch.tokens ^ 1, batch.targets, batch.weights)
    both = Batch(
        np.concatenate((batch.tokens, other.tokens)),
        np.concatenate((batch.targets, other.targets)),
        np.concatenate((batch.weights, other.weights)),
    )
    alone, together = session.evaluate(batch)["nll"][0], session.evaluate(both)["nll"]
    # Not bit for bit: a product of twice the rows may be summed in another order, and bf16 rounds what is left.
    tolerance = 1e-13 if session.policy.name == "fp64" else 2**-8
    np.testing.assert_allclose(together[0], alone, rtol=tolerance)
    assert np.abs(together[1] - alone).max() > 0.01
