"""`auto` on the CPU follows from the configuration and the processor's vendor, and every caller gets one answer."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.core.components.precision import POLICIES
from lockstep.core.config import auto
from lockstep.core.config.auto import (
    BEFORE,
    NARROW,
    ON_CPU,
    SHORT,
    WIDTHS,
    moved,
    on_cpu,
    settled,
    with_kernel_of_torch,
)
from lockstep.core.config.file import load_config
from lockstep.core.config.schema import AttentionConfig, OptimConfig, PrecisionConfig, RunConfig
from lockstep.core.plan.gpus import gpu_named
from lockstep.core.plan.memory import memory
from lockstep.core.plan.sizes import kernel_of
from lockstep.core.run.directory import RunDir
from lockstep.jax_backend.backend import JaxBackend
from lockstep.jax_backend.session import kernel_followed
from lockstep.parity_tests.candidates.ten_lines import MyGpt
from lockstep.scripts.shared.backends import on_its_device, open_candidate
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.precision import BF16_BY_ONEDNN

CPU = gpu_named("cpu")


@pytest.fixture(autouse=True)
def with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(auto, "has_avx512", lambda: True)
    # parity_tests/torch_backend/test_wide_product.py tests where they are True.
    monkeypatch.setattr(auto, "builds_bf16_products", lambda: False)
    monkeypatch.setattr(auto, "has_cpp_compiler", lambda: False)
    monkeypatch.setattr(auto, "vendor", lambda: "GenuineIntel")


def run(**settings) -> RunConfig:
    """Build a run on the CPU with heads so wide that memory does not matter; keys with `__` for dots."""
    wide = {"device": "cpu", "model.hidden": "512", "model.heads": "4", "model.kv_heads": "4"}
    told = {key.replace("__", "."): str(value) for key, value in settings.items()}
    return load_config(None, wide | {"train.sequence_length": str(SHORT - 1)} | told)


def kernel(**settings) -> str:
    return on_cpu(run(**settings))["attention.kernel"]


def test_length_decides():
    assert kernel() == "math"
    assert kernel(train__sequence_length=SHORT) == "flash"


def test_without_instructions_for_bf16_no_length_is_too_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(auto, "multiplies_bf16", lambda: False)
    assert kernel(train__sequence_length=SHORT) == "math"
    assert kernel(train__sequence_length=SHORT, precision__policy="fp32") == "flash"
    assert kernel(train__sequence_length=WIDTHS * 128 + 1) == "flash"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx avx2 fma", False),
        ("fpu avx avx2 avx512f avx512dq avx512cd avx512bw avx512vl", True),
        ("fpu avx avx2 avx512f avx512cd", False),
        ("fpu avx avx2 avx_vnni avx_ne_convert avx_vnni_int8", True),
        (None, True),
    ],
)
def test_the_instructions_are_read(flags, expected, tmp_path, monkeypatch):
    text = "processor\t: 0\nvendor_id\t: GenuineIntel\n" + (f"flags\t\t: {flags}\n" if flags else "")
    (tmp_path / "cpuinfo").write_text(f"{text}\nprocessor\t: 1\nflags\t\t: none\n" if flags else text)
    monkeypatch.undo()
    monkeypatch.setattr(auto, "Path", lambda name: tmp_path / "cpuinfo")
    auto._reported.cache_clear()
    try:
        assert auto.multiplies_bf16() is expected and auto.vendor() == "GenuineIntel"
    finally:
        auto._reported.cache_clear()


def test_the_processor_is_what_torch_finds(monkeypatch: pytest.MonkeyPatch):
    """Both must give one answer: one chooses the attention kernel, the other how products are computed."""
    monkeypatch.undo()
    on_x86 = platform.machine() == "x86_64" and sys.platform == "linux"
    if on_x86 and torch.backends.mkldnn.is_available():
        assert auto.multiplies_bf16() is BF16_BY_ONEDNN


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("fp64", "flash"), ("fp32", "flash"), ("bf16", "math"), ("fp16", "math"), ("fp8_rowwise", "math")],
)
def test_so_does_the_operands_dtype(policy, expected):
    assert kernel(precision__policy=policy) == expected
    assert (run(precision__policy=policy).precision.operand in NARROW) == (expected == "math")


def test_so_does_memory():
    """Heads so narrow that the scores of a token outweigh its hidden vectors."""
    for heads, head_dim in ((16, 32), (32, 16)):
        told = {"model__heads": heads, "model__kv_heads": heads}
        assert kernel(**told, train__sequence_length=WIDTHS * head_dim) == "math"
        assert kernel(**told, train__sequence_length=WIDTHS * head_dim + 1) == "flash"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "flash_brgemm"),
        ({"train__sequence_length": SHORT}, "flash_brgemm"),
        ({"precision__policy": "fp8_rowwise"}, "flash_brgemm"),
        ({"precision__policy": "fp16"}, "math"),
        ({"precision__policy": "fp32"}, "flash"),
        ({"precision__policy": "fp32", "vendor": "AuthenticAMD"}, "flash_brgemm"),
        ({"precision__policy": "tf32", "vendor": "AuthenticAMD"}, "flash_brgemm"),
        ({"precision__policy": "fp64", "vendor": "AuthenticAMD"}, "flash"),
        ({"attention__document_mask": "true"}, "math"),
        ({"model__window": 20}, "math"),
        ({"model__attention_cap": 50}, "math"),
        ({"model__family": "gpt2", "model__head_width": 127, "train__sequence_length": SHORT}, "flash"),
    ],
    ids=str,
)
def test_block_products_attend_without_a_mask(settings, expected, monkeypatch):
    """In bf16, and in FP32 on a processor that is not Intel's."""
    monkeypatch.setattr(auto, "builds_bf16_products", lambda: True)
    monkeypatch.setattr(auto, "has_cpp_compiler", lambda: True)
    maker = settings.get("vendor", "GenuineIntel")
    monkeypatch.setattr(auto, "vendor", lambda: maker)
    settings = {key: value for key, value in settings.items() if key != "vendor"}
    assert kernel(**settings) == expected
    found = settled(run(**settings), "cpu")
    assert settled(found, "cpu") == found
    assert RunConfig.model_validate(found.model_dump()) == found


@pytest.mark.parametrize("avx512", [True, False])
def test_block_products_attend_in_fp32_on_amds_without_avx512_too(avx512, monkeypatch):
    """FP32 products, in contrast, are BLAS's there."""
    monkeypatch.setattr(auto, "has_cpp_compiler", lambda: True)
    monkeypatch.setattr(auto, "vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(auto, "has_avx512", lambda: avx512)
    found = settled(run(precision__policy="fp32"), "cpu")
    assert found.attention.kernel == "flash_brgemm"
    assert found.precision.cpu_products == ("brgemm" if avx512 else "blas")


@pytest.mark.parametrize(
    ("maker", "avx512", "expected"),
    [("GenuineIntel", False, "flash_brgemm"), ("GenuineIntel", True, "math"), ("", False, "math")],
    ids=["x86", "x86 with AVX-512", "another processor"],
)
def test_block_products_attend_in_bf16_where_torch_has_plain_loops(maker, avx512, expected, monkeypatch):
    """Without bf16 instructions they multiply FP32 numbers. With AVX-512 torch hands its products to oneDNN."""
    monkeypatch.setattr(auto, "has_cpp_compiler", lambda: True)
    monkeypatch.setattr(auto, "vendor", lambda: maker)
    monkeypatch.setattr(auto, "multiplies_bf16", lambda: avx512)
    found = settled(run(), "cpu")
    assert found.attention.kernel == expected and found.precision.cpu_products == "blas"


class Foreign:
    """A trainer that names nothing but itself."""

    name = "foreign"

    def open(self, config: RunConfig) -> Any:
        raise AssertionError("it is not opened")


class OwnSession(TorchBackend):
    """A candidate with a session of its own, which runs Lockstep's kernels."""

    def describe(self, config: RunConfig) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("builds", [True, False])
def test_other_trainers_run_the_kernel_of_torchs_call_on_every_machine(builds, monkeypatch):
    monkeypatch.setattr(auto, "builds_bf16_products", lambda: builds)
    eager = {"compile__enabled": "false"}
    for asked in (run(**eager), run(**eager, train__sequence_length=SHORT), run(**eager, precision__policy="fp32")):
        for backend in (open_candidate("hf"), MyGpt(), Foreign()):
            assert on_its_device(asked, backend).attention.kernel == "flash"
        for backend in (JaxBackend(), OwnSession()):
            assert on_its_device(asked, backend).attention.kernel == "auto"
    named = run(attention__kernel="math")
    assert on_its_device(named, Foreign()) == named


def test_that_kernel_is_for_the_cpu_and_for_scores_without_a_cap():
    capped = run(model__attention_cap=50)
    assert with_kernel_of_torch(capped, "cpu") == capped
    assert settled(capped, "cpu").attention.kernel == "math"
    assert with_kernel_of_torch(run(), "cuda") == run()


def test_a_kernel_that_is_not_there_has_another_one_in_its_place(monkeypatch):
    """A run of another machine, a branch with other operands, a capsule that is opened on CUDA, an older run."""
    monkeypatch.setattr(auto, "builds_bf16_products", lambda: True)
    monkeypatch.setattr(auto, "has_cpp_compiler", lambda: True)
    asked, recorded = run(), on_cpu(run())
    found = settled(asked, "cpu", recorded)
    assert found.attention.kernel == "flash_brgemm"
    assert settled(asked, "cpu", {**recorded, "attention.kernel": "math"}).attention.kernel == "math"
    assert settled(found, "cuda").attention.kernel == "auto"
    in_fp64 = found.model_copy(update={"precision": PrecisionConfig(policy="fp64")})
    assert settled(in_fp64, "cpu").attention.kernel == "flash"
    monkeypatch.setattr(auto, "builds_bf16_products", lambda: False)
    assert settled(asked, "cpu", recorded).attention.kernel == settled(moved(found), "cpu").attention.kernel
    assert moved(found).attention.kernel == "flash_brgemm" and moved(found).precision.cpu_products == "auto"
    monkeypatch.setattr(auto, "has_cpp_compiler", lambda: False)
    assert settled(asked, "cpu", recorded).attention.kernel == "math"
    assert settled(moved(found), "cpu").attention.kernel == "math"
    # A request by name stays, and a session refuses it.
    assert settled(found, "cpu").attention.kernel == "flash_brgemm"


def test_the_longest_sequence_of_a_curriculum_decides():
    assert kernel(train__sequence_length=64, train__curriculum="64:0.5, 128:0.5") == "math"
    assert kernel(train__sequence_length=64, train__curriculum="64:0.5, 256:0.5") == "flash"


@pytest.mark.parametrize(
    "changed",
    [
        {"train__micro_batch_size": 1},
        {"train__ranks": 2, "train__micro_batch_size": 2},
        {"compile__enabled": "false"},
        {"recompute__parts": "block"},
        {"eval__every": 0},
    ],
    ids=str,
)
def test_what_a_resume_may_change_does_not_decide(changed):
    """Nor the program: eager and compiled are compared with each other."""
    for length in (SHORT - 1, SHORT):
        assert on_cpu(run(train__sequence_length=length, **changed)) == on_cpu(run(train__sequence_length=length))


def test_what_was_asked_for_by_name_stays():
    for name in ("flash", "math"):
        config = run(attention__kernel=name, optim__fused="false", precision__cpu_products="blas")
        assert settled(config, "cpu") == config


def test_it_stands_in_its_place(monkeypatch: pytest.MonkeyPatch):
    found = settled(run(), "cpu")
    assert (found.attention.kernel, found.optim.fused) == ("math", True)
    assert settled(found, "cpu") == found
    asked = {"attention": AttentionConfig(), "optim": OptimConfig(), "precision": PrecisionConfig()}
    assert found.model_copy(update=asked) == run()
    monkeypatch.setattr(auto, "vendor", lambda: "AuthenticAMD")
    in_fp32 = settled(run(precision__policy="fp32", compile__enabled="false"), "cpu")
    assert in_fp32.precision.cpu_products == "onednn"
    assert RunConfig.model_validate(in_fp32.model_dump()) == in_fp32
    before = settled(run(), "cpu", BEFORE)
    assert (before.attention.kernel, before.optim.fused) == ("flash", False)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_what_is_settled_once_stays_on_any_machine(policy: str, monkeypatch: pytest.MonkeyPatch):
    """A session settles what a run or a capsule has settled by its record, which may be another policy's."""
    asked = run(precision__policy=policy, compile__enabled="false")
    for recorded in ("brgemm", "onednn", "blas"):
        monkeypatch.setattr(auto, "builds_bf16_products", lambda: True)
        found = settled(asked, "cpu", {"precision.cpu_products": recorded})
        for maker, builds in (("AuthenticAMD", True), ("AuthenticAMD", False), ("GenuineIntel", False)):
            monkeypatch.setattr(auto, "vendor", lambda maker=maker: maker)
            monkeypatch.setattr(auto, "builds_bf16_products", lambda builds=builds: builds)
            assert settled(found, "cpu") == found
            assert RunConfig.model_validate(found.model_dump()) == found
            without_device = settled(asked.model_copy(update={"device": "auto"}), "cpu")
            assert RunConfig.model_validate(without_device.model_dump()) == without_device


def test_products_of_a_record_stay_where_they_can(monkeypatch: pytest.MonkeyPatch):
    """Copies of a bf16 run from before the block product stay. A branch in FP32 keeps the block product."""
    for builds in ("builds_bf16_products", "has_cpp_compiler"):
        monkeypatch.setattr(auto, builds, lambda: True)
    monkeypatch.setattr(auto, "vendor", lambda: "AuthenticAMD")

    def products(policy: str, recorded: str) -> str:
        config = run(precision__policy=policy, compile__enabled="false")
        return settled(config, "cpu", {"precision.cpu_products": recorded}).precision.cpu_products

    assert [products("bf16", recorded) for recorded in ("onednn", "blas", "brgemm")] == ["blas", "blas", "brgemm"]
    assert [products("fp32", recorded) for recorded in ("onednn", "blas", "brgemm")] == ["onednn", "blas", "brgemm"]
    # Opened on another machine, a run in bf16 goes on with copies, and one in FP32 with oneDNN's whole products. A
    # request by name stays, and a session refuses it.
    for builds in ("builds_bf16_products", "has_cpp_compiler"):
        monkeypatch.setattr(auto, builds, lambda: False)
    assert [products("bf16", recorded) for recorded in ("onednn", "blas", "brgemm")] == ["blas", "blas", "blas"]
    assert [products("fp32", recorded) for recorded in ("onednn", "blas", "brgemm")] == ["onednn", "blas", "onednn"]
    asked = run(precision__cpu_products="brgemm")
    assert settled(asked, "cpu").precision.cpu_products == "brgemm"


def test_on_cuda_it_stays():
    assert settled(run(), "cuda") == run()


@pytest.mark.parametrize("compiled", [False, True])
def test_products_of_the_cpu_do_not_go_elsewhere(compiled: bool, monkeypatch: pytest.MonkeyPatch):
    """An FP32 configuration that was settled on the CPU (a capsule's) is opened on CUDA, or with another program."""
    monkeypatch.setattr(auto, "vendor", lambda: "AuthenticAMD")
    asked = run(precision__policy="fp32", compile__enabled=compiled, attention__kernel="math", optim__fused="true")
    found = settled(asked, "cpu")
    assert (found.precision.cpu_products, found.precision.policy) == ("onednn", "fp32")
    other = {"compile": found.compile.model_copy(update={"enabled": not compiled})}
    assert settled(found.model_copy(update=other), "cpu") == found.model_copy(update=other)
    moved = {**other, "device": "cuda"}
    assert settled(found.model_copy(update=moved), "cuda") == asked.model_copy(update=moved)


def test_a_compiled_run_goes_on_with_the_products_that_it_had(monkeypatch: pytest.MonkeyPatch):
    """Programs of FP32 had torch's BLAS before run.json recorded their library; eager steps had oneDNN."""
    monkeypatch.setattr(auto, "vendor", lambda: "AuthenticAMD")
    for compiled, had in ((True, "blas"), (False, "onednn")):
        asked = run(precision__policy="fp32", compile__enabled=compiled)
        for recorded in ({}, {"precision.cpu_products": "onednn"}):
            assert settled(asked, "cpu", recorded).precision.cpu_products == had
        assert settled(asked, "cpu", on_cpu(asked)).precision.cpu_products == "onednn"


@pytest.mark.parametrize(("policy", "fused"), [("fp32", "auto"), ("fp64", True)])
def test_eight_bit_adamw_has_one_implementation(policy, fused):
    """A settled configuration can be written down and read again."""
    found = settled(run(optim__name="adamw8bit", precision__policy=policy), "cpu")
    assert found.optim.fused == fused
    assert RunConfig.model_validate(found.model_dump()) == found


@pytest.mark.parametrize("length", [128, 256])
def test_backends_and_plan_have_the_same_answer(length):
    config = run(train__sequence_length=length, model__layers=1, model__hidden=128, model__heads=1, model__kv_heads=1)
    name = on_cpu(config)["attention.kernel"]
    assert kernel_of(config, CPU).name == name
    assert kernel_followed(config) == {"math": "math", "flash": "cpu"}[name]
    torch, jax = TorchBackend().open(config), JaxBackend().open(config)
    assert torch.model.kernel.name == torch.config.attention.kernel == name
    assert jax.policy.kernel == kernel_followed(config)
    assert f"{name} kernel" in TorchBackend().describe(config)["in_force"]["attention"]
    assert f"torch's {name} kernel" in JaxBackend().describe(config)["in_force"]["attention"]


def test_the_plan_counts_the_scores():
    short, named = run(), run(attention__kernel="math")
    assert memory(short, CPU) == memory(named, CPU)
    assert memory(short, CPU).saved > memory(run(attention__kernel="flash"), CPU).saved


# The run directory


def test_a_run_keeps_what_it_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A rule that is measured anew changes no run that is there."""
    with RunDir.create(tmp_path / "run", run(), {}) as made:
        assert made.config == settled(run(), "cpu")
        assert made.asked == run()
    monkeypatch.setattr(auto, "SHORT", 1)
    assert on_cpu(run())["attention.kernel"] == "flash"
    again = RunDir.open(tmp_path / "run")
    assert again.info[ON_CPU] == on_cpu(run()) | {"attention.kernel": "math"}
    assert (again.config.attention.kernel, again.asked.attention.kernel) == ("math", "auto")
    assert again.config_at(1) == again.config


def test_of_a_run_that_kept_none_it_is_what_it_was(tmp_path: Path):
    with RunDir.create(tmp_path / "run", run(), {}) as made:
        info = {key: value for key, value in made.info.items() if key != ON_CPU}
    old = RunDir(tmp_path / "run", run(), info, None)
    assert (old.config.attention.kernel, old.config.optim.fused) == ("flash", False)


def test_it_follows_the_device(tmp_path: Path):
    """A run on CUDA has CUDA's `auto`, and on the CPU what is kept; so has one that was begun on the CPU."""
    for device in ("cpu", "cuda"):
        config = run(device=device)
        with RunDir.create(tmp_path / device, config, {}) as made:
            assert made.config_at(1, "cpu").attention.kernel == "math"
            assert made.config_at(1, "cpu").device == "cpu"
            assert made.config_at(1, "cuda").attention.kernel == "auto"
            assert made.config_at(1) == made.config
    assert made.config.attention.kernel == "auto"
