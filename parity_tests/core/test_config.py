"""Run files: mistakes are reported all at once, with file and key; valid settings come back equal."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lockstep.core.config.file import dump_config, load_config
from lockstep.core.config.file import settings as known_settings
from lockstep.core.config.rules import RULES
from lockstep.core.config.schema import ModelConfig, RunConfig, TrainConfig
from lockstep.core.errors import UserError
from lockstep.parity_tests.slow_tests import amount


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "run.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def complaints(path: Path, overrides: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(UserError) as error:
        load_config(path, overrides)
    return str(error.value).splitlines()


def test_an_empty_file_is_the_default(write):
    assert load_config(write("")) == RunConfig()
    assert load_config(write("[model]\n[train]\n")) == RunConfig()


@pytest.mark.parametrize(
    "text, right",
    [
        ("[optim]\npeek_lr = 1e-3", "optim.peak_lr"),
        ("[optm]\npeak_lr = 1e-3", "optim.peak_lr"),
        ("[train]\npeak_lr = 1e-3", "optim.peak_lr"),
        ("sede = 1", "seed"),
    ],
)
def test_an_unknown_key_names_the_nearest_right_one(write, text, right):
    path = write(text)
    (line,) = complaints(path)
    assert line.startswith(f"{path}: ")
    assert line.endswith(f"is not a setting; did you mean {right}?")


def test_a_key_like_nothing_gets_no_suggestion(write):
    (line,) = complaints(write("[zzz]\nqqqqqq = 1"))
    assert line.endswith("zzz.qqqqqq is not a setting")


@pytest.mark.parametrize("text", ["[zzz]", "[model.zzz]", "[seed]"])
def test_an_unknown_section_without_keys_is_not_passed_over(write, text):
    assert len(complaints(write(text))) == 1


def test_a_section_is_not_a_value(write):
    (line,) = complaints(write("model = 3"))
    assert line.endswith("model is a section, not a value (3)")


def test_all_errors_come_at_once_each_with_its_file(write):
    base = write('[train]\nsteps = -5\n[model]\nlayers = "six"', "base.toml")
    path = write('base = "base.toml"\nsede = 1\n[model]\nheads = 12', "run.toml")
    lines = complaints(path, {"optim.beta1": "1.5", "nonsense": "1"})
    assert len(lines) == 6
    for origin, key in (
        (base, "train.steps = -5"),
        (base, "model.layers = 'six'"),
        (path, "sede is not a setting"),
        (path, "model.heads: "),
        ("command line", "optim.beta1 = '1.5'"),
        ("command line", "nonsense is not a setting"),
    ):
        assert any(line.startswith(f"{origin}: {key}") for line in lines), (origin, key, lines)


@pytest.mark.parametrize(
    "text, part",
    [
        ("seed = 1.5", "seed = 1.5"),
        ("seed = true", "seed = True"),
        ('seed = "1"', "seed = '1'"),
        ("seed = -1", "greater than or equal to 0"),
        ("[optim]\npeak_lr = 0", "greater than 0"),
        ("[optim]\npeak_lr = nan", "finite number"),
        ("[optim]\npeak_lr = inf", "finite number"),
        ("[optim]\nbeta2 = 1.0", "less than 1"),
        ('[train]\ncurriculum = "128"', "'128' is not LENGTH:SHARE, such as 2048:0.9"),
        ('[train]\ncurriculum = "128:1e9"', "'128:1e9' is not LENGTH:SHARE, such as 2048:0.9"),
        ('[train]\ncurriculum = "128:0.9, 256:0.2"', "the shares add up to 1.1, not to 1"),
        ('[train]\ncurriculum = "128:1, 256:0"', "'256:0' has a share of zero steps"),
        ('[data]\nmixture = "a:0, b:0"', "the weights add up to zero"),
        ('[data]\nmixture = "a:-1, b:2"', "a has the weight -1; a weight is zero or more"),
        ('[data]\nmixture = "a:nan"', "a has the weight 'nan'; a weight is a number such as 0.7, 3 or 1/3"),
        ('[data]\nmixture = "a:1, a:2"', "a occurs twice"),
        ("[data]\nwait_minutes = nan", "finite number"),
        ('[precision]\npolicy = "fp8"', "'fp8_rowwise' or 'fp8_delayed'"),
        (
            'name = "../up"',
            "name = '../up': must begin with a letter from A to Z or a digit; '.', '_' and '-' are",
        ),
        ('name = ""', "must begin with a letter"),
        ('name = "Ünï"', "must begin with a letter"),
        ("[compile]\nenabled = 1", "compile.enabled = 1"),
    ],
)
def test_types_and_ranges(write, text, part):
    (line,) = complaints(write(text))
    assert part in line


def test_an_integer_is_a_float(write):
    assert load_config(write("[optim]\npeak_lr = 1")).optim.peak_lr == 1.0


# Base


def test_the_nearer_file_wins(write):
    write("seed = 1\n[train]\nsteps = 100\nbatch_size = 32", "a.toml")
    write('base = "a.toml"\nseed = 2\n[train]\nsteps = 200', "b.toml")
    config = load_config(write('base = "b.toml"\nseed = 3', "c.toml"))
    assert (config.seed, config.train.steps, config.train.batch_size) == (3, 200, 32)


def test_base_is_relative_to_its_file(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "base.toml").write_text("seed = 9")
    (tmp_path / "deep" / "run.toml").write_text('base = "../base.toml"')
    assert load_config(tmp_path / "deep" / "run.toml").seed == 9


def test_base_cycles_and_missing_bases_are_said(write):
    a = write('base = "b.toml"', "a.toml")
    write('base = "a.toml"', "b.toml")
    (line,) = complaints(a)
    assert "is its own base" in line
    missing = write('base = "gone.toml"', "c.toml")
    (line,) = complaints(missing)
    assert line.startswith(f"{missing}: base: no such run file")
    (line,) = complaints(write("base = 3"))
    assert "must be the path of another run file" in line


def test_what_is_not_toml(write, tmp_path):
    (line,) = complaints(write("seed = = 1"))
    assert "not TOML" in line
    (line,) = complaints(tmp_path)
    assert "cannot read" in line


# Overrides


def test_overrides_are_text_and_win(write):
    overrides = {
        "train.steps": "300",
        "optim.peak_lr": "3e-4",
        "compile.enabled": "false",
        "precision.policy": "fp64",
        "log.sample_prompt": "1",
    }
    config = load_config(write("[train]\nsteps = -1"), overrides)
    assert (config.train.steps, config.optim.peak_lr, config.compile.enabled) == (300, 3e-4, False)
    assert (config.precision.policy, config.log.sample_prompt) == ("fp64", "1")


@pytest.mark.parametrize("key, text", [("train.steps", "3.5"), ("train.steps", "many"), ("compile.enabled", "perhaps")])
def test_a_wrong_override_is_blamed_on_the_command_line(write, key, text):
    (line,) = complaints(write(""), {key: text})
    assert line.startswith(f"command line: {key} = '{text}': ")


# Rules over several fields

FSDP = {"parallel.strategy": "fsdp", "compile.scope": "blocks"}
BROKEN = {
    ("data.wait_minutes", "data.window_shards"): [{"data.wait_minutes": "5"}],
    ("parallel.strategy", "compile.enabled", "compile.scope", "compile.mode"): [
        {"parallel.strategy": "fsdp"},
        {**FSDP, "compile.mode": "reduce-overhead", "device": "cuda"},
    ],
    ("parallel.strategy", "optim.name", "optim.eight_bit"): [
        {**FSDP, "optim.name": "adamw8bit", "optim.eight_bit": "bitsandbytes"},
    ],
    ("parallel.reduce_every_micro_batch", "parallel.strategy", "parallel.gradient_dtype"): [
        {"parallel.reduce_every_micro_batch": "true"},
        {**FSDP, "parallel.reduce_every_micro_batch": "true", "parallel.gradient_dtype": "bf16"},
    ],
    ("parity.reference_device", "parity.device_gb"): [{"parity.reference_device": "cuda"}],
    ("loss.head", "loss.z_loss"): [
        {"loss.head": "torch", "loss.z_loss": "1e-4"},
        {"loss.head": "cce", "compile.scope": "blocks", "loss.z_loss": "1e-4"},
    ],
    ("loss.head", "precision.policy"): [
        {"loss.head": "cce", "compile.scope": "blocks", "precision.policy": "fp32"},
        {"loss.head": "liger", "compile.scope": "blocks", "precision.policy": "fp64"},
        {"loss.head": "one_kernel", "precision.policy": "fp64"},
    ],
    ("loss.head", "compile.enabled", "compile.scope"): [{"loss.head": "liger"}, {"loss.head": "cce"}],
    ("model.hidden", "model.heads", "model.head_width"): [{"model.hidden": "250"}],
    ("model.family", "model.hidden", "model.heads", "model.head_width"): [
        {"model.hidden": "24", "model.heads": "8"},
        {"model.head_width": "15"},
        {"model.family": "gemma2", "model.head_width": "15"},
    ],
    ("model.family", "model.positions", "train.sequence_length", "train.curriculum"): [
        {"model.family": "gpt2", "model.positions": "100"},
        {"model.family": "gpt2", "train.curriculum": "128:0.5, 2048:0.5", "train.micro_batch_size": "16"},
    ],
    ("model.rope_factor", "model.rope_low", "model.rope_high"): [{"model.rope_factor": "8", "model.rope_low": "4"}],
    ("model.attention_cap", "attention.kernel"): [{"model.attention_cap": "50", "attention.kernel": "flash"}],
    ("attention.kernel", "device", "precision.policy"): [
        {"attention.kernel": "flash_brgemm", "device": "cuda"},
        {"attention.kernel": "flash_brgemm", "device": "cpu", "precision.policy": "fp16"},
    ],
    ("attention.kernel", "attention.document_mask", "model.window"): [
        {"attention.kernel": "flash_brgemm", "device": "cpu", "attention.document_mask": "true"},
        {"attention.kernel": "flash_brgemm", "device": "cpu", "model.window": "20"},
    ],
    ("attention.kernel", "model.hidden", "model.heads", "model.head_width"): [
        {"attention.kernel": "flash_brgemm", "device": "cpu", "model.family": "gpt2", "model.head_width": "15"},
    ],
    ("model.logits_cap", "loss.head"): [
        {"model.logits_cap": "30", "loss.head": "one_kernel", "precision.policy": "bf16"},
        {"model.logits_cap": "30", "loss.head": "torch"},
    ],
    ("precision.casts", "model.family", "model.window"): [
        {"precision.casts": "autocast", "model.window": "20"},
        {"precision.casts": "autocast", "model.family": "gpt2"},
        {"precision.casts": "residual=bf16", "model.family": "qwen3"},
    ],
    ("model.heads", "model.kv_heads"): [{"model.kv_heads": "3"}],
    ("train.batch_size", "train.ranks", "train.micro_batch_size"): [{"train.batch_size": "24"}, {"train.ranks": "2"}],
    ("train.curriculum", "train.sequence_length", "train.micro_batch_size", "train.steps"): [
        {"train.curriculum": "64:0.5, 256:0.5"},
        {"train.curriculum": "128:0.5, 192:0.5"},
        {"train.curriculum": "128:0.9, 4096:0.1"},
        {"train.curriculum": "128:0.999, 256:0.001"},
    ],
    ("optim.warmup_steps", "train.steps"): [{"optim.warmup_steps": "200"}, {"train.steps": "20"}],
    ("optim.decay_share", "optim.schedule", "optim.warmup_steps", "train.steps"): [
        {"optim.schedule": "wsd", "optim.decay_share": "0.95"},
        {"optim.schedule": "wsd", "optim.warmup_steps": "190"},
    ],
    ("optim.schedule", "optim.decay_share", "optim.decay_shape"): [
        {"optim.decay_share": "0.2"},
        {"optim.schedule": "linear", "optim.decay_shape": "linear"},
    ],
    ("precision.cpu_products", "device"): [{"precision.cpu_products": "onednn", "device": "cuda"}],
    ("precision.cpu_products", "device", "precision.policy"): [
        {"precision.cpu_products": "brgemm", "device": "cpu", "precision.policy": "fp16"},
        {"precision.cpu_products": "brgemm", "device": "cpu", "precision.policy": "fp64"},
        {"precision.cpu_products": "brgemm", "device": "cuda"},
    ],
    ("precision.loss_scale",): [{"precision.loss_scale": "1000"}, {"precision.loss_scale": "1e300"}],
    ("precision.casts", "precision.policy"): [
        {"precision.casts": "autocast", "precision.policy": "fp32"},
        {"precision.casts": "residual=bf16", "precision.policy": "fp16"},
        {"precision.casts": "angles=fp32", "precision.policy": "fp64"},
    ],
    ("precision.casts", "loss.head"): [{"precision.casts": "logits=bf16", "loss.head": "torch"}],
    ("attention.grouped", "device"): [{"attention.grouped": "kernel", "device": "cuda"}],
    ("recompute.parts", "recompute.keep_products", "recompute.every"): [
        {"recompute.parts": "mpl"},
        {"recompute.parts": "block, mlp"},
        {"recompute.keep_products": "true"},
        {"recompute.parts": "embedding", "recompute.every": "2"},
    ],
    ("recompute.memory_budget", "compile.enabled", "compile.backend"): [
        {"recompute.memory_budget": "0.5", "compile.enabled": "false"},
        {"recompute.memory_budget": "0.5", "compile.backend": "aot_eager"},
    ],
    ("compile.mode", "compile.enabled", "compile.backend"): [
        {"compile.mode": "max-autotune", "compile.enabled": "false"},
        {"compile.mode": "max-autotune", "compile.backend": "aot_eager"},
    ],
    ("optim.eight_bit", "optim.name"): [
        {"optim.eight_bit": "bitsandbytes"},
        {"optim.eight_bit": "bitsandbytes", "optim.name": "muon"},
    ],
    ("optim.fused", "optim.name", "precision.policy"): [
        {"optim.fused": "false", "optim.name": "adamw8bit"},
        {"optim.fused": "true", "optim.name": "adamw8bit", "precision.policy": "fp32"},
    ],
    ("compile.mode", "device"): [{"compile.mode": "reduce-overhead", "device": "cpu"}],
    ("compile.mode", "deterministic"): [{"compile.mode": "max-autotune", "deterministic": "true"}],
    ("model.family",): [{"model.family": "lama"}],
    ("precision.fp8_layers", "precision.policy", "model.family", "model.layers"): [
        {"precision.policy": "fp8_tensorwise", "precision.fp8_layers": "blocks.99.*"},
        {"precision.policy": "fp8_rowwise", "precision.fp8_layers": "*"},
        {"precision.policy": "fp8_rowwise", "precision.fp8_layers": "lm_head"},
        {"precision.policy": "fp8_rowwise", "precision.fp8_layers": ""},
    ],
}


def test_every_rule_has_a_case():
    assert {rule.keys for rule in RULES} == set(BROKEN)


@pytest.mark.parametrize("keys, overrides", [(keys, case) for keys, cases in BROKEN.items() for case in cases])
def test_a_broken_rule_blames_what_was_set(write, keys, overrides):
    (line,) = complaints(write(""), overrides)
    assert line.startswith("command line: ")
    assert any(line.startswith(f"command line: {key}: ") for key in keys if key in overrides)


def test_settings_that_clash_are_blamed_on_the_place_that_came_last(write):
    base = write("[train]\nbatch_size = 4", "base.toml")
    (line,) = complaints(base, {"train.micro_batch_size": "3"})
    assert line.startswith("command line: train.micro_batch_size: 4 sequences are not a multiple")
    path = write('base = "base.toml"\n[train]\nmicro_batch_size = 3', "run.toml")
    (line,) = complaints(path)
    assert line.startswith(f"{path}: train.micro_batch_size: ")


def test_rules_hold_for_objects_too():
    with pytest.raises(ValidationError, match="do not divide"):
        RunConfig(model=ModelConfig(heads=7))
    assert TrainConfig(batch_size=32, micro_batch_size=4, ranks=2).accumulation == 4


def test_a_config_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().seed = 3


# Round trip

counts = st.integers(0, 2**70)
paths = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=60)
positives = st.integers(1, 2**40)


def floats(low: float, high: float = 1e300, **options) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False, allow_infinity=False, **options)


@st.composite
def configs(draw) -> RunConfig:
    kv_heads, group, half, micro, ranks, accumulation = (draw(st.integers(1, 64)) for _ in range(6))
    steps = draw(positives)
    tree = {
        "name": draw(st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]*\Z")),
        "seed": draw(counts),
        "device": draw(st.sampled_from(["auto", "cpu", "cuda"])),
        "model": {
            "kv_heads": kv_heads,
            "heads": kv_heads * group,
            "hidden": kv_heads * group * 2 * half,
            "norm_eps": draw(floats(0, exclude_min=True)),
            "rope_theta": draw(floats(1, exclude_min=True)),
            "tied": draw(st.booleans()),
        },
        "train": {
            "steps": steps,
            "batch_size": micro * ranks * accumulation,
            "micro_batch_size": micro,
            "ranks": ranks,
        },
        "optim": {
            "warmup_steps": draw(st.integers(0, steps - 1)),
            "min_lr_ratio": draw(floats(0, 1)),
            "beta1": draw(floats(0, 1, exclude_max=True)),
            "eps": draw(floats(0, exclude_min=True)),
        },
        "precision": {"policy": draw(st.sampled_from(["fp64", "fp32", "bf16"]))},
        "data": {
            "path": draw(paths),
            "memory_limit_gib": draw(floats(0)),
        },
        "log": {"sample_prompt": draw(st.text())},
    }
    return RunConfig.model_validate(tree)


@settings(max_examples=amount(12, with_all=200), deadline=None)
@given(config=configs())
def test_a_dumped_config_reloads_to_an_equal_one(config, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "dumped.toml"
    path.write_text(dump_config(config), encoding="utf-8", newline="")
    assert load_config(path) == config


def test_every_setting_is_described_or_plain():
    undescribed = {key for key, field in known_settings().items() if not field.description}
    assert undescribed <= {"log.wandb_project"}, "a setting has a description"
    assert not math.isnan(RunConfig().optim.peak_lr)
