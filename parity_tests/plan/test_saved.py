"""The formulas of saved bytes match torch's saved tensors, counted under fake tensors."""

import pytest

from lockstep.core.components.cast_plan import VALUES
from lockstep.core.config.file import load_config
from lockstep.core.plan import GPUS, parts
from lockstep.core.plan.memory import passes
from lockstep.core.plan.sizes import sizes_of
from lockstep.torch_backend.tools.plan import count_compiled, count_saved

BASE = {
    "device": "cpu",
    "model.vocab_size": "384",
    "model.hidden": "64",
    "model.layers": "3",
    "model.heads": "4",
    "model.kv_heads": "2",
    "model.ffn_hidden": "160",
    "train.batch_size": "4",
    "train.micro_batch_size": "4",
    "train.sequence_length": "32",
    "optim.warmup_steps": "0",
    "loss.head": "full",
    "compile.enabled": "false",
    # `auto` is `math` here under bf16 (core/config/auto.py).
    "attention.kernel": "flash",
}
EXACT = [
    {},
    {"precision.policy": "fp32"},
    {"precision.policy": "fp64"},
    {"precision.policy": "fp16"},
    {"precision.policy": "fp8_tensorwise"},
    {"loss.head": "chunked"},
    {"attention.kernel": "math"},
    {"attention.kernel": "math", "precision.policy": "fp32"},
    {"recompute.parts": "norms"},
    {"model.layers": "5", "model.kv_heads": "4", "train.sequence_length": "64"},
    {"model.tied": "false"},
    *({"precision.casts": f"{key}={value}"} for key, values in VALUES.items() for value in values[1:]),
    {"precision.casts": "autocast"},
    {"precision.casts": "autocast, residual=bf16, norm=bf16", "loss.head": "chunked"},
    {"precision.casts": "norm=fp16, act=after silu and product, logits=fp16", "precision.policy": "fp16"},
    {"precision.casts": "autocast, norm=bf16", "precision.policy": "fp8_tensorwise"},
]
AGAIN = [{"recompute.parts": parts} for parts in ("attention", "mlp", "attention,mlp", "block")]
COMPILED = [
    {},
    {"precision.policy": "fp32"},
    {"loss.head": "chunked"},
    {"recompute.parts": "mlp"},
    {"attention.kernel": "math"},
]


def config(settings):
    return load_config(None, BASE | settings)


def estimated(settings):
    made = config(settings)
    return passes(made, sizes_of(made, GPUS["cpu"])).saved


@pytest.mark.parametrize("settings", EXACT, ids=str)
def test_eager_to_the_byte_by_part(settings):
    found = count_saved(config(settings))
    assert {name: size for name, size in estimated(settings).items() if size} == pytest.approx(found, abs=0.5)


def test_an_mlp_without_a_formula_to_the_byte():
    """Gemma 2's keeps GELU's output beside the two inputs."""
    settings = {"model.family": "gemma2"}
    assert estimated(settings)["mlp"] == pytest.approx(count_saved(config(settings))["mlp"], abs=0.5)


@pytest.mark.parametrize("settings", AGAIN, ids=str)
def test_what_is_computed_again_keeps_its_inputs(settings):
    """Whole: a checkpoint's inputs have no known holder. Beside tokens and RoPE's tables, which are never freed."""
    made = config(settings)
    small = 8 * 4 * 32 * 2 + 4 * 32 * made.model.head_dim + 8
    assert sum(count_saved(made).values()) == pytest.approx(sum(estimated(settings).values()), abs=small)


def test_kept_grows_by_the_same_with_every_layer():
    sizes = [sum(count_saved(config({"model.layers": str(n)})).values()) for n in (1, 2, 4)]
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0])


@pytest.mark.parametrize("settings", COMPILED, ids=str)
def test_compiled_as_inductor_partitions_it(settings):
    """But for the tokens, which are the program's own input."""
    settings = settings | {"compile.enabled": "true"}
    count, ours = count_compiled(config(settings)), sum(estimated(settings).values())
    assert ours - count == pytest.approx(8 * 4 * 32, abs=0.5)


def test_the_count_sees_a_forgotten_tensor(monkeypatch):
    honest = parts.mlp

    def forgetful(*arguments, **more):
        part = honest(*arguments, **more)
        return parts.Part({k: v for k, v in part.saved.items() if k != "up"}, part.forward, part.backward)

    monkeypatch.setattr(parts, "mlp", forgetful)
    with pytest.raises(AssertionError):
        test_eager_to_the_byte_by_part({})
