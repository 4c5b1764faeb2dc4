"""Six steps are three steps, a state, another session and three steps, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.parity_tests.cross.variants import ALL_BIASES, same_bits
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend


def run(session, steps):
    return [session.step(uneven_weights(text_batch(session.config, s), s)) for s in steps]


@pytest.mark.parametrize("policy, compiled", [("bf16", False), ("bf16", True), ("fp64", False)])
def test_resume_is_bit_exact(policy, compiled):
    torch._dynamo.reset()
    config = tiny_config(policy, compiled, layers=1, train={"sequence_length": 32}, tied=False, **ALL_BIASES)
    whole, first, second = (TorchBackend().open(config) for _ in range(3))
    records = run(whole, range(6))
    run(first, range(3))
    second.load(first.state())
    assert run(second, range(3, 6)) == records[3:]
    assert second.steps_done == 6
    assert same_bits(second.state(), whole.state())


@pytest.mark.parametrize("lost", ["step", "exp_avg", "exp_avg_sq"])
def test_what_is_lost_on_the_way_is_seen(lost):
    """The negative twin: each part of the state matters."""
    config = tiny_config("bf16", train={"sequence_length": 32})
    whole, first, second = (TorchBackend().open(config) for _ in range(3))
    run(whole, range(4))
    run(first, range(3))
    state = first.state()
    if lost == "step":
        state = replace(state, step=0)
    else:
        zeros = {name: 0 * moment for name, moment in state.optimizer[lost].items()}
        state = replace(state, optimizer={**state.optimizer, lost: zeros})
    second.load(state)
    run(second, range(3, 4))
    name = "blocks.0.mlp.up_proj.weight"
    assert second.state().params[name].tobytes() != whole.state().params[name].tobytes()
