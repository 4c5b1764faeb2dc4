"""The model as data: a made-up operation and a made-up optimizer are found wherever names, shapes and costs are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from lockstep.core.backend import State
from lockstep.core.checkpoint.format import load_checkpoint, save_checkpoint
from lockstep.core.components.optimizers import ADAMW, OPTIMIZERS, Optimizer, UpdateRule
from lockstep.core.config.schema import (
    AttentionConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
)
from lockstep.core.model.budget import flops_per_token, optimizer_bytes, parameter_count, update_flops
from lockstep.core.model.families import FAMILIES, graph_of, llama
from lockstep.core.model.graph import Constant, Graph, Normal, Operation, Parameter
from lockstep.core.model.groups import check_state, moment_names
from lockstep.core.model.init import init_parameters
from lockstep.core.model.names import edge_names, fp8_modules, groups_of, parameter_shapes, probe_shapes, tap_names
from lockstep.core.parity.reference.stages import chain, place, shared_tensors, stages_of
from lockstep.core.plan.gpus import gpu_named
from lockstep.core.plan.memory import memory
from lockstep.parity_tests.tiny import tiny_config

WIDTH = 24


def with_an_adapter(model: ModelConfig, attention: AttentionConfig, loss: LossConfig) -> list[Operation]:
    """Llama with one more linear layer in each block, from the MLP's normed input into WIDTH numbers."""
    found = []
    for one in llama.operations(model, attention, loss):
        found.append(one)
        if one.id == "mlp_norm":
            at = f"blocks.{one.layer}.mlp"
            weight = Parameter(f"{at}.down_adapter.weight", (WIDTH, model.hidden), "matrices", Normal(0.5))
            bias = Parameter(f"{at}.down_adapter.bias", (WIDTH,), "biases", Constant(0.25))
            found.append(
                Operation(
                    "adapter",
                    "linear",
                    f"{at}.adapter",
                    one.layer,
                    "mlp",
                    {"x": one.tap},
                    {"weight": weight, "bias": bias},
                    (WIDTH,),
                    flops=(2.0 * WIDTH * model.hidden, 0.0),
                )
            )
    return found


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setitem(FAMILIES, "made_up", with_an_adapter)
    graph_of.cache_clear()
    yield "made_up"
    graph_of.cache_clear()


@pytest.fixture
def config(family: str) -> RunConfig:
    tiny = tiny_config("bf16")
    return tiny.model_copy(update={"model": tiny.model.model_copy(update={"family": family})})


def test_a_made_up_operation_has_names_shapes_groups_and_initial_values(config: RunConfig) -> None:
    model, weight, bias = config.model, "blocks.1.mlp.down_adapter.weight", "blocks.1.mlp.down_adapter.bias"
    assert parameter_shapes(model)[weight] == (WIDTH, model.hidden)
    assert (groups_of(model)[weight], groups_of(model)[bias]) == ("matrices", "biases")
    assert (
        list(parameter_shapes(model)).index(weight)
        == list(parameter_shapes(model)).index("blocks.1.mlp_norm.weight") + 1
    )
    initial = init_parameters(model, 0)
    assert initial[weight].std() == pytest.approx(0.5, rel=0.1) and (initial[bias] == 0.25).all()


def test_a_made_up_operation_has_taps_edges_and_a_stage(config: RunConfig) -> None:
    model, tap = config.model, "blocks.0.mlp.adapter"
    assert tap in tap_names(model) and f"{tap}.x" in edge_names(model)
    assert probe_shapes(model, 2, 8)[tap] == (2, 8, WIDTH)
    stage = next(stage for stage in stages_of(config) if stage.id == "adapter")
    assert (stage.kind, stage.sends("x"), stage.sends("weight")) == (
        "linear",
        f"{tap}.x",
        "blocks.0.mlp.down_adapter.weight",
    )
    assert chain().phases["adapter"] == "forward"
    assert place("mlp_norm", "forward", 0) < place("adapter", "forward", 0) < place("gate", "forward", 0)
    assert place("gate", "backward", 0) < place("adapter", "backward", 0) < place("mlp_norm", "backward", 0)
    readers = next(one for one in shared_tensors(config) if one.name == "blocks.0.mlp_norm").consumers
    assert [reader.id for reader, _, _ in readers] == ["adapter", "gate", "up"]


def test_a_made_up_operation_costs_flops_memory_and_may_be_in_fp8(config: RunConfig) -> None:
    plain = config.model.model_copy(update={"family": "llama"})
    more = (WIDTH * plain.hidden + WIDTH) * plain.layers
    assert parameter_count(config.model) - parameter_count(plain) == more
    assert flops_per_token(config.model, 64)["6N"] - flops_per_token(plain, 64)["6N"] == 6 * more
    of_plain = memory(config.model_copy(update={"model": plain}), gpu_named("h100"))
    assert memory(config, gpu_named("h100")).state["weights"] - of_plain.state["weights"] == 4 * more
    fp8 = config.model_copy(update={"precision": PrecisionConfig(policy="fp8_rowwise", fp8_layers="*.down_*")})
    assert fp8_modules(fp8) == {
        f"blocks.{i}.mlp.{name}" for i in range(plain.layers) for name in ("down_proj", "down_adapter")
    }


def test_a_made_up_operation_is_in_checkpoints(config: RunConfig, tmp_path) -> None:
    params = init_parameters(config.model, 0)
    moments = {
        kind: {name: np.zeros_like(params[name]) for name in names} for kind, names in moment_names(config).items()
    }
    state = State(3, params, moments)
    check_state(config, state)
    loaded, _ = load_checkpoint(save_checkpoint(tmp_path, state, {}))
    check_state(config, loaded)
    assert "blocks.1.mlp.down_adapter.weight" in loaded.optimizer["exp_avg"]
    with pytest.raises(ValueError, match=r"not the model's.*down_adapter"):
        check_state(tiny_config("bf16"), loaded)


# An optimizer


LION = UpdateRule("lion", "Lion", ("exp_avg",), moment_bytes=2.0, bounds="lion", flops=lambda shape, settings: 7.0)


@pytest.fixture
def lion(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Lion for matrices, AdamW for the rest; its one moment takes two bytes a number."""

    def rule(parameter: Parameter, settings) -> UpdateRule:
        return LION if parameter.group == "matrices" else ADAMW

    monkeypatch.setitem(OPTIMIZERS, "lion", Optimizer("lion", (LION,), rule))
    return RunConfig(optim=OptimConfig(name="lion", warmup_steps=0))


def test_a_made_up_optimizer_is_a_setting(lion: RunConfig) -> None:
    assert lion.optim.name == "lion"
    with pytest.raises(ValueError, match="Input should be 'adamw', 'adamw8bit', 'muon' or 'lion'"):
        OptimConfig(name="lyon")


def test_a_made_up_optimizer_has_state_bytes_and_flops(lion: RunConfig) -> None:
    groups, kinds = groups_of(lion.model), moment_names(lion)
    assert set(kinds["exp_avg_sq"]) == {name for name, group in groups.items() if group != "matrices"}
    assert set(kinds["exp_avg"]) == set(groups)
    sizes = {name: p.size for name, p in graph_of(lion.model).parameters.items()}
    matrices = sum(size for name, size in sizes.items() if groups[name] == "matrices")
    assert optimizer_bytes(lion) == 28 * sum(sizes.values()) - matrices * (16 - 4)
    assert update_flops(lion) == 7.0 * sum(group == "matrices" for group in groups.values())
    plain = memory(RunConfig(), gpu_named("h100")).state["moments"]
    assert plain - memory(lion, gpu_named("h100")).state["moments"] == 6 * matrices


def test_a_made_up_optimizer_is_in_checkpoints(lion: RunConfig, tmp_path) -> None:
    params = init_parameters(lion.model, 0)
    moments = {
        kind: {name: np.zeros_like(params[name]) for name in names} for kind, names in moment_names(lion).items()
    }
    loaded, _ = load_checkpoint(save_checkpoint(tmp_path, State(1, params, moments), {}))
    check_state(lion, loaded)
    with pytest.raises(ValueError, match="exp_avg_sq: names differ"):
        check_state(lion.model_copy(update={"optim": OptimConfig()}), loaded)


# A chain that is not sound


def test_a_chain_must_be_sound() -> None:
    operations = llama.operations(ModelConfig(layers=1), AttentionConfig(), LossConfig())
    Graph.of(operations)
    for broken, said in (
        (operations[1:], "no earlier operation writes"),
        ([*operations, operations[-1]], "two operations write nll"),
        ([replace(operations[0], kind="look-up"), *operations[1:]], "no kind of operation"),
    ):
        with pytest.raises(ValueError, match=said):
            Graph.of(broken)
    other = Parameter("embed.weight", (3, 4), "embedding", Normal(1.0))
    head = next(one for one in operations if one.id == "logits")
    with pytest.raises(ValueError, match="two different parameters"):
        Graph.of([replace(one, parameters={"weight": other}) if one is head else one for one in operations])
