"""The two models are one function: per-token NLL, loss and every gradient, far below the precision of the candidate."""

from dataclasses import replace

import pytest

from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.cross.variants import VARIANTS, relative, shaken_state
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend

# Relative distance of two correct implementations. Measured: 2.4e-15 and 1.7e-6 (11 and 15 units of rounding), for
# every variant. The limits leave room for other kernels, not for a mistake.
LIMIT = {"fp64": 1e-12, "fp32": 1e-5}

CASES = [
    *(("fp64", name, 1) for name in VARIANTS),
    ("fp64", "tied", 2),
    ("fp64", "tied", 4),
    ("fp32", "untied-biased", 1),
]


@pytest.mark.parametrize("policy, variant, micro", CASES)
def test_nll_loss_and_gradients_agree(policy, variant, micro):
    """Four sequences with uneven loss weights, as four micro-batches of one, two of two or one of four."""
    config = tiny_config(policy, train={"micro_batch_size": micro, "sequence_length": 32}, **VARIANTS[variant])
    batch = uneven_weights(text_batch(config), 0)
    state = shaken_state(config.model)
    results = []
    for backend in (TorchBackend(), JaxBackend()):
        session = backend.open(config)
        session.load(state)
        results.append(session.gradients(batch))
    ours, theirs = results
    assert set(ours.grads) == set(theirs.grads) == set(state.params)
    assert relative(ours.nll, theirs.nll) < LIMIT[policy]
    assert abs(ours.loss - theirs.loss) < LIMIT[policy] * abs(theirs.loss)
    far = {n: d for n, g in ours.grads.items() if (d := relative(g, theirs.grads[n])) >= LIMIT[policy]}
    assert not far


def test_a_head_out_of_place_is_seen():
    """The negative twin: key heads 0 and 1 exchanged on one side."""
    config = tiny_config("fp64", train={"micro_batch_size": 1, "sequence_length": 32})
    batch = uneven_weights(text_batch(config), 0)
    state = shaken_state(config.model)
    right, wrong = TorchBackend().open(config), TorchBackend().open(config)
    name, size = "blocks.1.attn.k_proj.weight", config.model.head_dim
    swapped = state.params[name].copy()
    swapped[: 2 * size] = swapped[: 2 * size].reshape(2, size, -1)[::-1].reshape(2 * size, -1)
    right.load(state)
    wrong.load(replace(state, params={**state.params, name: swapped}))
    a, b = right.gradients(batch), wrong.gradients(batch)
    assert relative(a.nll, b.nll) > 1e-6
    assert relative(a.grads["embed.weight"], b.grads["embed.weight"]) > 1e-4
