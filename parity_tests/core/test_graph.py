"""The model as data: a made-up operation and a made-up optimizer are found wherever names, shapes and costs are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from lockstep.core.backend import State
from lockstep.core.checkpoint.format import load_checkpoint, save_checkpoint
from lockstep.core.components.attention_kernels import ATTENTION_KERNELS, AttentionKernel, taken_on_cuda
from lockstep.core.components.loss_heads import LOSS_HEADS, LossHead
from lockstep.core.components.optimizers import ADAMW, OPTIMIZERS, Optimizer, UpdateRule, all_rules
from lockstep.core.components.precision import POLICIES, PrecisionPolicy
from lockstep.core.config.schema import (
    AttentionConfig,
    CompileConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RecomputeConfig,
    RunConfig,
)
from lockstep.core.model.budget import (
    flops_per_token,
    forward_products,
    optimizer_bytes,
    parameter_count,
    peak_flops,
    recomputed_flops_per_token,
    update_flops,
)
from lockstep.core.model.families import FAMILIES, graph_of
from lockstep.core.model.graph import KINDS, OUTPUT, Constant, Graph, Kind, Normal, Operation, Parameter
from lockstep.core.model.groups import check_state, moment_names
from lockstep.core.model.init import init_parameters
from lockstep.core.model.names import edge_names, fp8_modules, groups_of, parameter_shapes, probe_shapes, tap_names
from lockstep.core.parity.reference.stages import (
    chain,
    is_library_head,
    library_heads,
    place,
    shared_tensors,
    stages_of,
)
from lockstep.core.plan.gpus import gpu_named
from lockstep.core.plan.head import head
from lockstep.core.plan.memory import memory, optimizer_working
from lockstep.core.plan.seconds import seconds
from lockstep.core.plan.sizes import kernel_of, sizes_of
from lockstep.core.train.skipped_steps import first_scalars
from lockstep.parity_tests.repository import REPO
from lockstep.parity_tests.tiny import tiny_config

WIDTH = 24


def with_an_adapter(model: ModelConfig, attention: AttentionConfig, loss: LossConfig) -> list[Operation]:
    """Llama with one more linear layer in each block, from the MLP's normed input into WIDTH numbers."""
    found = []
    for one in FAMILIES["llama"](model, attention, loss):
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


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("policy", ["bf16", "fp32"])
def test_a_made_up_operation_is_in_the_plan(config: RunConfig, policy: str, compiled: bool) -> None:
    """A linear layer copies its input and its weight in the operand dtype, if that is another one.

    Its input is the normed one. Without casts the MLP keeps it anyway, and so does a compiled program, with one copy.
    """
    settings = {"precision": PrecisionConfig(policy=policy), "compile": CompileConfig(enabled=compiled)}
    config, gpu = config.model_copy(update=settings), gpu_named("h100")
    model, tokens = config.model, config.train.micro_batch_size * config.train.sequence_length
    plain = config.model_copy(update={"model": model.model_copy(update={"family": "llama"})})
    ours, other = memory(config, gpu), memory(plain, gpu)
    more = (WIDTH * model.hidden + WIDTH) * model.layers
    assert (ours.state["weights"] - other.state["weights"], ours.gradients - other.gradients) == (4 * more, 4 * more)
    assert ours.state["moments"] - other.state["moments"] == 8 * more
    # Biases are not cast.
    copied = 0 if compiled else tokens * model.hidden
    kept = 2 * (copied + WIDTH * model.hidden + WIDTH) * model.layers if policy == "bf16" else 0
    saved = {name: ours.activations[name] - size for name, size in other.activations.items()}
    assert saved.pop("mlp") == kept and not any(saved.values())
    again = RecomputeConfig(parts="mlp")
    both = [memory(one.model_copy(update={"recompute": again}), gpu) for one in (config, plain)]
    assert both[0].activations == both[1].activations
    assert ours.peak > other.peak + 12 * more
    times, of_plain = seconds(config, gpu), seconds(plain, gpu)
    assert times is not None and of_plain is not None
    assert times.products > of_plain.products and times.memory > of_plain.memory
    tap = "blocks.0.mlp.adapter"
    assert forward_products(model, 8)[tap] == 2 * WIDTH * model.hidden


# A kind of operation


def with_a_scan(model: ModelConfig, attention: AttentionConfig, loss: LossConfig) -> list[Operation]:
    """Llama with a recurrence after each attention and one before the head, whose derivative needs what they write."""
    found: list[Operation] = []
    for one in FAMILIES["llama"](model, attention, loss):
        if one.id == "mlp_norm" or one.part == "head":
            at = "scan" if one.layer is None else f"blocks.{one.layer}.scan"
            decay = Parameter(f"{at}.decay", (model.hidden,), "gains", Constant(0.5))
            x = "final_norm" if one.layer is None else one.reads["x"]
            read = Operation("scan", "scan", at, one.layer, "scan", {"x": x}, {"weight": decay}, (model.hidden,))
            if at not in {other.tap for other in found}:
                found.append(read)
        found.append(one)
    return found


def test_a_made_up_kind_has_a_stage_and_a_place_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "scan", Kind("scan", saves=(OUTPUT,)))
    monkeypatch.setitem(FAMILIES, "scanned", with_a_scan)
    config = tiny_config("bf16")
    model = config.model.model_copy(update={"family": "scanned"})
    ours = config.model_copy(update={"model": model})
    stages = [stage for stage in stages_of(ours) if stage.kind == "scan"]
    assert [stage.tap for stage in stages] == [*(f"blocks.{i}.scan" for i in range(model.layers)), "scan"]
    assert chain().kinds["scan"] == "scan" and place("attn_residual", "forward", 0) < place("scan", "forward", 0)
    gpu, tokens = gpu_named("h100"), config.train.micro_batch_size * config.train.sequence_length
    found, plain = memory(ours, gpu), memory(config, gpu)
    assert found.activations == {**plain.activations, "scan": 4 * tokens * model.hidden * (model.layers + 1)}
    assert found.state["weights"] - plain.state["weights"] == 4 * model.hidden * (model.layers + 1)
    # There at the start of the backward pass, all of them; moments are twice the weights.
    assert found.peak >= plain.peak + found.activations["scan"] + 3 * 4 * model.hidden * (model.layers + 1)


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


LION = UpdateRule(
    "lion", "Lion", ("exp_avg",), moment_bytes=2.0, bounds="lion", flops=lambda shape, settings: 7.0, working=5.0
)


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
    gpu = gpu_named("h100")
    assert memory(RunConfig(), gpu).state["moments"] - memory(lion, gpu).state["moments"] == 6 * matrices
    # An update of the largest matrix holds five copies of it.
    largest = max(size for name, size in sizes.items() if groups[name] == "matrices")
    quiet = lion.model_copy(update={"log": lion.log.model_copy(update={"norms_every": 0})})
    assert optimizer_working(quiet, sizes_of(quiet, gpu)) == 5 * 4 * largest


def test_a_made_up_optimizer_is_in_checkpoints(lion: RunConfig, tmp_path) -> None:
    params = init_parameters(lion.model, 0)
    moments = {
        kind: {name: np.zeros_like(params[name]) for name in names} for kind, names in moment_names(lion).items()
    }
    loaded, _ = load_checkpoint(save_checkpoint(tmp_path, State(1, params, moments), {}))
    check_state(lion, loaded)
    with pytest.raises(ValueError, match="exp_avg_sq: names differ"):
        check_state(lion.model_copy(update={"optim": OptimConfig()}), loaded)


# A loss head


def _rows(tokens: int, hidden: int, vocab: int, chunk: int) -> int:
    return 16


APPLE = LossHead(
    "apple",
    "Apple's, by {chunk}",
    _rows,
    library=True,
    z_loss=False,
    refuses=("fp16",),
    because="Apple's computes in bf16, not under {policy}",
    reads_on_host=True,
)


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setitem(LOSS_HEADS, "apple", APPLE)
    return RunConfig.model_validate({"loss": {"head": "apple"}, "compile": {"scope": "blocks"}})


def test_a_made_up_loss_head_is_a_setting_with_its_rules(apple: RunConfig) -> None:
    assert apple.loss.of_library and not apple.loss.chosen.whole
    assert apple.loss.chosen.in_force(4096, 0.5) == "Apple's, by 4,096, z-loss 0.5"
    for section, values, said in (
        ("loss", {"head": "apple", "z_loss": 1e-4}, "the head of apple has no z-loss"),
        ("precision", {"policy": "fp16"}, "Apple's computes in bf16, not under fp16; take 'chunked'"),
        ("compile", {"scope": "model"}, "cannot be part of one compiled program"),
    ):
        with pytest.raises(ValueError, match=said):
            RunConfig.model_validate({"loss": {"head": "apple"}, "compile": {"scope": "blocks"}, section: values})
    heads = "'full', 'chunked', 'one_kernel', 'torch', 'liger', 'cce' or 'apple'"
    with pytest.raises(ValueError, match=f"Input should be {heads}"):
        LossConfig(head="pear")


def test_a_made_up_loss_head_has_a_stage_and_a_place_in_the_plan(apple: RunConfig) -> None:
    assert chain().kinds["apple_head"] == "library_head" and chain().phases["apple_head"] == "forward"
    assert is_library_head("apple_head") and "apple_head" in library_heads()
    assert stages_of(apple)[-1].id == "apple_head" and "logits" not in {stage.tap for stage in stages_of(apple)}
    z = sizes_of(apple, gpu_named("h100"))
    assert head(z, apple.loss, True).logits == 16 * z.operand * z.vocab
    made = z.operand * (z.tokens * z.hidden + z.vocab * z.hidden + 16 * z.vocab) + 8 * z.tokens
    assert head(z, apple.loss, True).forward.made == made


# An attention kernel


def test_a_made_up_attention_kernel_is_a_setting_and_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps three statistics of a row, takes no mask, and its output is computed again."""
    ring = AttentionKernel("ring", "ring attention", of_call=False, mask_as_numbers=False, rows=3, kept=False)
    monkeypatch.setitem(ATTENTION_KERNELS, "ring", ring)
    gpu, block = gpu_named("h100"), {"recompute": {"parts": "block", "keep_products": True}}

    def planned(kernel: str, **changes: object) -> RunConfig:
        attention = {"kernel": kernel, "document_mask": True}
        return RunConfig.model_validate({"attention": attention, "precision": {"policy": "bf16"}, **changes})

    ours, other = planned("ring"), planned("efficient")
    assert kernel_of(ours, gpu) is ring and ours.attention.chosen is ring
    z = sizes_of(ours, gpu)
    statistics, mask = 4 * z.tokens * z.heads * 2, z.operand * z.tokens * z.length
    saved = memory(ours, gpu).activations["attention"] - memory(other, gpu).activations["attention"]
    assert saved == ours.model.layers * (statistics - mask)
    again, kept = (recomputed_flops_per_token(planned(kernel, **block)) for kernel in ("ring", "efficient"))
    assert again is not None and kept is not None
    assert (again["causal"], kept["causal"]) == (2.0 * z.hidden * z.length * ours.model.layers, 0.0)
    # For a kernel of unknown rate, the least is taken.
    times, of_least = seconds(ours, gpu), seconds(other, gpu)
    assert times is not None and of_least is not None and times.attention == of_least.attention
    assert gpu.attention["efficient"] == min(gpu.attention.values())
    with pytest.raises(ValueError, match="'fa3', 'flex' or 'ring'"):
        AttentionConfig(kernel="rings")


def test_the_kernel_that_auto_ends_up_with_is_the_first_that_takes_the_operands() -> None:
    taken = {operand: taken_on_cuda(operand).name for operand in ("bf16", "fp16", "fp32", "tf32", "fp64")}
    assert taken == {"bf16": "cudnn", "fp16": "cudnn", "fp32": "efficient", "tf32": "efficient", "fp64": "math"}


# A precision policy


def test_a_made_up_policy_has_its_formats_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operands of FP16, scaled, without loss scaling's own policy."""
    monkeypatch.setitem(POLICIES, "half", PrecisionPolicy("half", "fp16", scaled=True, peak="bf16"))
    ours, other = (
        RunConfig.model_validate({"precision": {"policy": policy}, "compile": {"scope": "blocks"}})
        for policy in ("half", "fp16")
    )
    gpu = gpu_named("h100")
    assert (ours.precision.operand, ours.precision.stream, ours.precision.exact) == ("fp16", "fp32", False)
    assert memory(ours, gpu) == memory(other, gpu) and seconds(ours, gpu) == seconds(other, gpu)
    # The CPU makes products of FP16 in FP32.
    eager = [one.model_copy(update={"compile": CompileConfig(enabled=False)}) for one in (ours, other)]
    assert memory(eager[0], gpu_named("cpu")) == memory(eager[1], gpu_named("cpu"))
    assert first_scalars(ours) == first_scalars(other) != first_scalars(RunConfig())
    assert peak_flops("NVIDIA H200", "half") == peak_flops("NVIDIA H200", "fp16")
    with pytest.raises(ValueError, match="gradients in bf16 and FP16 alone, not under wide"):
        monkeypatch.setitem(POLICIES, "wide", PrecisionPolicy("wide", "fp32"))
        RunConfig.model_validate(
            {"precision": {"policy": "wide"}, "loss": {"head": "cce"}, "compile": {"scope": "blocks"}}
        )


# A chain that is not sound


def test_a_chain_must_be_sound() -> None:
    operations = FAMILIES["llama"](ModelConfig(layers=1), AttentionConfig(), LossConfig())
    Graph.of(operations)
    for broken, said in (
        (operations[1:], "no earlier operation writes"),
        ([*operations, operations[-1]], "two operations write nll"),
        ([replace(operations[0], kind="look-up"), *operations[1:]], "not a kind of operation"),
    ):
        with pytest.raises(ValueError, match=said):
            Graph.of(broken)
    other = Parameter("embed.weight", (3, 4), "embedding", Normal(1.0))
    head = next(one for one in operations if one.id == "logits")
    with pytest.raises(ValueError, match="two different parameters"):
        Graph.of([replace(one, parameters={"weight": other}) if one is head else one for one in operations])


def test_each_rule_has_a_script_that_repeats_its_update() -> None:
    """`repro.py` of a capsule is looked for only when an update disagrees."""
    folder = REPO / "core/parity/diagnose/repro_templates"
    assert all((folder / f"update_{rule.bounds or 'adamw'}.txt").is_file() for rule in all_rules())
