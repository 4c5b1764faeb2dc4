"""Weight decay pulls at matrices and at nothing else."""

from __future__ import annotations

import numpy as np
import pytest

import lockstep.torch_backend.optim
from lockstep.core.config.schema import OptimConfig
from lockstep.core.model.graph import GROUPS
from lockstep.core.model.groups import GroupSettings
from lockstep.core.model.names import groups_of
from lockstep.parity_tests.cross.variants import ALL_BIASES, shaken_state
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend

LR, DECAY = 0.01, 0.5
BASE = tiny_config("fp64", train={"sequence_length": 16}, tied=False, **ALL_BIASES)
STATE = shaken_state(BASE.model)
GROUP_OF = groups_of(BASE.model)


def after_a_step(decay, base=BASE, state=STATE):
    optim = OptimConfig(peak_lr=LR, warmup_steps=0, min_lr_ratio=1.0, weight_decay=decay)
    session = TorchBackend().open(base.model_copy(update={"optim": optim}))
    session.load(state)
    assert session.step(text_batch(base)).lr == LR
    return session.state().params


def decays_everything(config, group):
    return GroupSettings(1.0, config.optim.weight_decay)


def pulled_groups(with_decay, without):
    return {GROUP_OF[n] for n in without if not np.array_equal(with_decay[n], without[n])}


@pytest.fixture(scope="module")
def without():
    return after_a_step(0.0)


def test_only_matrices_are_pulled(without):
    assert {GROUP_OF[name] for name in without} == set(GROUPS)
    assert pulled_groups(after_a_step(DECAY), without) == {"matrices"}


def test_by_how_much(without):
    """λ·lr of the weight, not of the gradient's step: decoupled (Loshchilov & Hutter 2019)."""
    with_decay = after_a_step(DECAY)
    for name, start in STATE.params.items():
        if GROUP_OF[name] == "matrices":
            np.testing.assert_allclose(with_decay[name] - without[name], -LR * DECAY * start, rtol=0, atol=1e-15)


def test_a_tied_head_is_an_embedding():
    base = tiny_config("fp64", train={"sequence_length": 16})
    state = shaken_state(base.model)
    assert pulled_groups(after_a_step(DECAY, base, state), after_a_step(0.0, base, state)) == {"matrices"}


def test_decay_on_everything_is_seen(monkeypatch, without):
    monkeypatch.setattr(lockstep.torch_backend.optim, "group_settings", decays_everything)
    assert pulled_groups(after_a_step(DECAY), without) == set(GROUPS)


def test_every_parameter_is_optimized_once():
    session = TorchBackend().open(BASE)
    members = [(group["group"], p) for group in session.optimizer.param_groups for p in group["params"]]
    names = {id(p): name for name, p in session.parameters.items()}
    assert sorted(names[id(p)] for _, p in members) == sorted(session.parameters)
    assert all(GROUP_OF[names[id(p)]] == group for group, p in members)
