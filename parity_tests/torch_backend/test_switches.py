"""Torch's switches for precision are what the policy declares, and a run does not go on where somebody changed one."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.core.errors import UserError
from lockstep.parity_tests.repository import REPO
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession
from lockstep.torch_backend.switches import INDUCTOR, Switches, check_environment
from lockstep.torch_backend.tools.generate import Decoder

# Typed in part.
backends: Any = torch.backends
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
POLICIES = ["fp64", "fp32", "tf32", "bf16", "fp16", "fp8_tensorwise", "fp8_rowwise", "fp8_delayed"]
MATMUL = "torch.backends.cuda.matmul."

# Changes by other code, in either generation of torch's switches, and the switch that is then found changed.
CHANGES = {
    "allow_tf32": (lambda: setattr(backends.cuda.matmul, "allow_tf32", True), f"{MATMUL}fp32_precision"),
    "fp32_precision": (lambda: setattr(backends.cuda.matmul, "fp32_precision", "tf32"), f"{MATMUL}fp32_precision"),
    "high": (lambda: torch.set_float32_matmul_precision("high"), f"{MATMUL}fp32_precision"),
    "oneDNN in bf16": (
        lambda: setattr(backends.mkldnn.matmul, "fp32_precision", "bf16"), "torch.backends.mkldnn.matmul.fp32_precision"
    ),
    "cuDNN's allow_tf32": (
        lambda: setattr(backends.cudnn, "allow_tf32", True), "torch.backends.cudnn.conv.fp32_precision"
    ),
    "convolutions": (
        lambda: setattr(backends.cudnn.conv, "fp32_precision", "tf32"), "torch.backends.cudnn.conv.fp32_precision"
    ),
    "recurrent layers": (
        lambda: setattr(backends.cudnn.rnn, "fp32_precision", "tf32"), "torch.backends.cudnn.rnn.fp32_precision"
    ),
    "bf16 sums": (
        lambda: setattr(backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", True),
        f"{MATMUL}allow_bf16_reduced_precision_reduction",
    ),
    "FP16 sums": (
        lambda: setattr(backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", True),
        f"{MATMUL}allow_fp16_reduced_precision_reduction",
    ),
    "split-K": (
        lambda: setattr(backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", (False, False)),
        f"{MATMUL}allow_fp16_reduced_precision_reduction_split_k",
    ),
    "FP16 accumulation": (
        lambda: setattr(backends.cuda.matmul, "allow_fp16_accumulation", True), f"{MATMUL}allow_fp16_accumulation"
    ),
    "narrow math attention": (
        lambda: backends.cuda.allow_fp16_bf16_reduction_math_sdp(True),
        "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()",
    ),
    "autocast": (lambda: torch.set_autocast_enabled("cpu", True), "torch.is_autocast_enabled('cpu')"),
    "subnormal numbers": (lambda: torch.set_flush_denormal(True), "torch.set_flush_denormal"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_it_was():
    yield
    Switches("bf16", CPU).set()


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_declares_full_sums_and_its_own_products(policy):
    for change, _ in CHANGES.values():
        change()
    switches = Switches(policy, CPU)
    assert switches.read() != switches.declared
    switches.set()
    assert switches.read() == switches.declared
    allowed = policy == "tf32"
    # The older generation of switches reports the same; it raises where the two were mixed.
    assert backends.cuda.matmul.allow_tf32 is allowed and backends.cudnn.allow_tf32 is allowed
    assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")
    assert not backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    assert not backends.cuda.matmul.allow_bf16_reduced_precision_reduction


def same(one, other):
    return all(np.array_equal(p, other.params[name]) for name, p in one.params.items())


@pytest.mark.parametrize("name", CHANGES)
def test_a_switch_that_somebody_changed_ends_the_run_before_the_next_step(name):
    change, switch = CHANGES[name]
    config = tiny_config("fp16")
    session, batch = TorchBackend().open(config), text_batch(config)
    session.step(batch)
    before = session.state()
    change()
    for use in (session.step, session.gradients, session.evaluate, lambda b: session.observe(b, ["logits"])):
        with pytest.raises(UserError) as refused:
            use(batch)
        assert str(refused.value).startswith(f"{switch} is ")
        assert "precision.policy = 'fp16' declares" in str(refused.value)
    with pytest.raises(UserError, match="after the run was opened"):
        session.run_stage("act", {})
    assert same(session.state(), before) and session.steps_done == 1


def test_a_switch_that_a_step_itself_changes_moves_no_weight():
    """As a library would that is first imported within a step."""

    class Careless(TorchSession):
        def clip_coefficient(self, norm):
            backends.cuda.matmul.allow_tf32 = True
            return super().clip_coefficient(norm)

    config = tiny_config("bf16")
    session = Careless(config)
    before = session.state()
    with pytest.raises(UserError, match=r"fp32_precision is 'tf32', and precision\.policy = 'bf16' declares 'ieee'"):
        session.step(text_batch(config))
    assert same(session.state(), before) and session.steps_done == 0


def test_sessions_that_declare_otherwise_do_not_disturb_each_other():
    config = tiny_config("fp32")
    session, batch = TorchBackend().open(config), text_batch(config)
    other = Switches("tf32", CPU)
    other.set()
    assert backends.cuda.matmul.allow_tf32
    first = session.gradients(batch)
    assert not backends.cuda.matmul.allow_tf32
    other.require()
    assert backends.cuda.matmul.allow_tf32
    again = session.gradients(batch)
    assert all(np.array_equal(g, again.grads[name]) for name, g in first.grads.items())


def test_what_is_evaluated_under_another_policy_is_so_in_force():
    """`evaluate` in FP32 during a run in TF32."""
    session = TorchSession(tiny_config("fp32"))
    session.switches = Switches("tf32", CPU)
    session.switches.set()
    seen = []
    trunk = session.model.trunk
    session.model.trunk = lambda *inputs: seen.append(backends.cuda.matmul.allow_tf32) or trunk(*inputs)
    batch = text_batch(session.config)
    session.evaluate(batch, "fp32")
    assert seen == [False] and backends.cuda.matmul.allow_tf32
    session.evaluate(batch, "tf32")
    assert seen == [False, True]
    backends.cuda.matmul.allow_fp16_accumulation = True
    with pytest.raises(UserError, match="allow_fp16_accumulation"):
        session.evaluate(batch, "fp32")


def test_a_sample_is_refused_as_well():
    session = TorchSession(tiny_config("bf16"))
    decoder = Decoder(session.config, session.state().params, "cpu")
    decoder.next_token_logits(np.arange(3, dtype=np.int32))
    torch.set_float32_matmul_precision("medium")
    with pytest.raises(UserError, match="is 'tf32'"):
        decoder.next_token_logits(np.arange(4, dtype=np.int32))


@pytest.mark.parametrize("name", ["ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"])
def test_an_environment_that_narrows_products_on_the_cpu_is_refused(name, monkeypatch):
    monkeypatch.setenv(name, "BF16")
    for ask in (TorchBackend().open, TorchBackend().describe, TorchSession):
        with pytest.raises(UserError, match=f"{name}=BF16.*'fp32' declares; unset it"):
            ask(tiny_config("fp32"))
    monkeypatch.setenv(name, "strict")
    check_environment("fp32", CPU)


@pytest.mark.parametrize(("value", "policy", "refused"), [
    ("0", "tf32", True), ("0", "bf16", False), ("1", "bf16", True), ("1", "tf32", True), ("", "tf32", False)
])  # fmt: skip
def test_an_environment_that_overrides_tf32_is_refused(value, policy, refused, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", value)
    check_environment(policy, CPU)
    if not refused:
        check_environment(policy, CUDA)
        return
    with pytest.raises(UserError, match=f"NVIDIA_TF32_OVERRIDE={value} "):
        check_environment(policy, CUDA)


def test_a_container_that_allows_tf32_is_overruled():
    """NVIDIA's set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE."""
    code = (
        "import torch; from lockstep.torch_backend.switches import Switches; before = "
        "torch.backends.cuda.matmul.allow_tf32;"
        "Switches('fp32', torch.device('cpu')).set(); print(before, torch.backends.cuda.matmul.allow_tf32)"
    )
    environment = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    told = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=environment, capture_output=True, text=True)
    assert told.stdout.split() == ["True", "False"], told.stderr


def test_the_compiler_is_given_its_precision_as_well(monkeypatch):
    """Its own switches come from the environment, too."""
    given = []
    monkeypatch.setattr(torch, "compile", lambda program, **how: given.append(how["options"]) or program)
    config = tiny_config("fp32", compiled=True)
    for backend in ("inductor", "aot_eager"):
        compiler = config.compile.model_copy(update={"backend": backend})
        TorchSession(config.model_copy(update={"compile": compiler}))
    options, none = given
    assert none is None and options["emulate_precision_casts"]
    assert {name: options[name] for name in INDUCTOR} == dict(INDUCTOR)
