"""Rate, decay and state by parameter group, against numbers by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lockstep.core.components.optimizers import BITSANDBYTES_8BIT, OPTIMIZERS, TORCHAO_8BIT
from lockstep.core.config.schema import OptimConfig, RunConfig
from lockstep.core.model.graph import GROUPS, Normal, Parameter
from lockstep.core.model.groups import check_state, group_settings, moment_names, update_rules
from lockstep.core.model.names import parameter_shapes
from lockstep.parity_tests.tiny import tiny_config
from lockstep.scripts.studies.clean_runs import initial_state

SCALES = {"matrices_lr_scale": 2.0, "embedding_lr_scale": 3.0, "head_lr_scale": 5.0, "gains_lr_scale": 7.0}
DECAYS = {"weight_decay": 0.1, "embedding_weight_decay": 0.2, "head_weight_decay": 0.3, "gains_weight_decay": 0.4}


def settings(config: RunConfig, **optim) -> dict[str, tuple[float, float]]:
    config = config.model_copy(update={"optim": OptimConfig(**optim)})
    return {group: (s.lr_factor, s.weight_decay) for group in GROUPS for s in [group_settings(config, group)]}


def test_by_default_matrices_decay_and_all_learn_alike():
    assert settings(tiny_config()) == {g: (1.0, 0.1 if g == "matrices" else 0.0) for g in GROUPS}


def test_each_group_has_its_own_scale_and_decay():
    assert settings(tiny_config(), **SCALES, **DECAYS) == {
        "embedding": (3.0, 0.2),
        "head": (5.0, 0.3),
        "matrices": (2.0, 0.1),
        "gains": (7.0, 0.4),
        "biases": (7.0, 0.0),
    }


def test_the_width_rule_is_of_matrices_alone():
    """Hidden is 64: a base of 16 makes a quarter."""
    factors = {g: f for g, (f, _) in settings(tiny_config(), base_width=16, **SCALES).items()}
    assert factors == {"embedding": 3.0, "head": 5.0, "matrices": 0.5, "gains": 7.0, "biases": 7.0}


def test_the_batch_rule_is_of_all():
    """A batch of 4 at a base of 1: twice the rate, whatever a micro-batch holds."""
    assert {f for f, _ in settings(tiny_config(), base_batch=1).values()} == {2.0}
    assert settings(tiny_config(), base_batch=1, base_width=16)["matrices"][0] == 0.5


def test_which_state_is_kept():
    config = tiny_config(tied=False, qkv_bias=True)
    shapes = parameter_shapes(config.model)
    adamw = config.model_copy(update={"optim": OptimConfig(name="adamw8bit")})
    assert {rule.moments for rule in update_rules(adamw).values()} == {("exp_avg", "exp_avg_sq")}
    kinds = moment_names(config.model_copy(update={"optim": OptimConfig(name="muon")}))
    assert set(kinds["momentum_buffer"]) == {n for n in shapes if "_proj.weight" in n}
    assert kinds["exp_avg"] == kinds["exp_avg_sq"] == [n for n in shapes if "_proj.weight" not in n]


@pytest.mark.parametrize(
    ("shape", "is_quantised"),
    [((64, 64), True), ((32, 64), False), ((64, 66), False), ((4096,), True), ((96, 48), True)],
)
def test_small_and_odd_tensors_are_not_quantised(shape, is_quantised):
    parameter = Parameter("some.weight", shape, "matrices", Normal(1.0))

    def rule(**optim):
        settings = OptimConfig(**optim)
        return OPTIMIZERS[settings.name].rule(parameter, settings)

    assert (rule(name="adamw8bit") is TORCHAO_8BIT) is is_quantised
    assert rule().moment_bytes is None
    # In bitsandbytes the last block is a shorter one.
    with_rest = rule(name="adamw8bit", eight_bit="bitsandbytes") is BITSANDBYTES_8BIT
    assert with_rest is (is_quantised or shape == (64, 66))


def test_under_fp64_nothing_is_rounded_to_eight_bits():
    config = tiny_config("fp64").model_copy(update={"optim": OptimConfig(name="adamw8bit")})
    assert {rule.name for rule in update_rules(config).values()} == {"adamw"}


def test_a_state_of_another_optimizer_is_refused():
    config = tiny_config()
    muon = config.model_copy(update={"optim": OptimConfig(name="muon")})
    for one, other in ((config, muon), (muon, config)):
        state = initial_state(one, 0)
        check_state(one, state)
        with pytest.raises(ValueError, match="keeps"):
            check_state(other, state)
    buffers = initial_state(muon, 0).optimizer
    short = {n: a for n, a in buffers["momentum_buffer"].items() if n != "blocks.0.attn.q_proj.weight"}
    with pytest.raises(ValueError, match=r"momentum_buffer: names differ.*q_proj"):
        check_state(muon, replace(initial_state(muon, 0), optimizer={**buffers, "momentum_buffer": short}))
    flat = {**buffers["momentum_buffer"], "blocks.0.attn.q_proj.weight": np.zeros(4096, np.float32)}
    with pytest.raises(ValueError, match="has shape"):
        check_state(muon, replace(initial_state(muon, 0), optimizer={**buffers, "momentum_buffer": flat}))
