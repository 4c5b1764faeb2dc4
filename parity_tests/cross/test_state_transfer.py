"""A state that goes into a session comes out bit for bit, in either backend and from one to the other."""

from dataclasses import replace

import numpy as np
import pytest

from lockstep.core.backend import State
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.cross.variants import ALL_BIASES, same_bits
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend

CONFIG = tiny_config("bf16", layers=1, train={"sequence_length": 32}, tied=False, **ALL_BIASES)
BACKENDS = [TorchBackend(), JaxBackend()]


@pytest.fixture(scope="module")
def stepped():
    """Return a state of torch after two steps: moments are not zero."""
    session = TorchBackend().open(CONFIG)
    for seed in range(2):
        session.step(text_batch(CONFIG, seed))
    return session.state()


def copied(state: State) -> State:
    """Copy the same bits to other memory."""
    moments = {kind: {n: m.copy() for n, m in by_name.items()} for kind, by_name in state.optimizer.items()}
    return State(state.step, {n: p.copy() for n, p in state.params.items()}, moments)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_what_is_loaded_comes_out(backend, stepped):
    session = backend.open(CONFIG)
    assert not same_bits(session.state(), stepped)
    session.load(stepped)
    assert same_bits(session.state(), stepped)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_a_state_is_a_copy(backend, stepped):
    """Writing into what was taken out, or into what was put in, does not reach the session.

    JAX may share memory, depending on its alignment, so every array is written to.
    """
    session = backend.open(CONFIG)
    given = copied(stepped)
    session.load(given)
    for state in (given, session.state()):
        for arrays in (state.params, *state.optimizer.values()):
            for array in arrays.values():
                array[:] = 7.0
    assert same_bits(session.state(), stepped)


def test_from_jax_to_torch_to_jax():
    """And the step after the journey is the step without it, bit for bit."""
    stayed = JaxBackend().open(CONFIG)
    stayed.step(text_batch(CONFIG, 0))
    there, back = TorchBackend().open(CONFIG), JaxBackend().open(CONFIG)
    there.load(stayed.state())
    back.load(there.state())
    assert same_bits(back.state(), stayed.state())
    a, b = stayed.step(text_batch(CONFIG, 1)), back.step(text_batch(CONFIG, 1))
    assert a == b and a.step == 2
    assert same_bits(back.state(), stayed.state())


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_a_foreign_state_is_refused(backend, stepped):
    session = backend.open(CONFIG)
    missing = {n: p for n, p in stepped.params.items() if n != "final_norm.weight"}
    wrong_shape = {**stepped.params, "final_norm.weight": np.ones(3, np.float32)}
    for params in (missing, wrong_shape):
        with pytest.raises(ValueError, match=r"final_norm\.weight"):
            session.load(replace(stepped, params=params))
