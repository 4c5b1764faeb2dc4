"""The kernel that was asked for is the one that runs; one that cannot is refused in one line, before anything else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from lockstep.core.config import auto
from lockstep.core.config.auto import builds_bf16_products, has_cpp_compiler
from lockstep.core.config.schema import AttentionConfig
from lockstep.core.errors import UserError
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.attention import BACKENDS, Kernel, Machine, document_mask, in_force, refusal
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

CPU = Machine("cpu")
HOPPER = Machine("cuda", (9, 0), cudnn=True, triton=True, fa3=True)
AMPERE = replace(HOPPER, capability=(8, 0))
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

REFUSED = [
    ("cudnn", CPU, BF16, 64, False, "runs on CUDA alone"),
    ("efficient", CPU, BF16, 64, False, "runs on CUDA alone"),
    ("fa3", CPU, BF16, 64, False, "runs on CUDA alone"),
    ("flex", CPU, BF16, 64, False, "no backward pass on the CPU"),
    ("flash_brgemm", HOPPER, BF16, 64, False, "runs on the CPU alone.*use cudnn, flash"),
    ("cudnn", HOPPER, FP32, 64, False, "takes bfloat16 or float16.*use flex, efficient or math"),
    ("flash", HOPPER, FP32, 64, False, "takes bfloat16 or float16"),
    ("fa3", HOPPER, FP64, 64, False, "takes bfloat16 or float16.*use math"),
    ("efficient", HOPPER, FP64, 64, False, "operands float64; use math"),
    ("flex", HOPPER, FP64, 64, False, "operands float64; use math"),
    ("flash", HOPPER, BF16, 64, True, "takes no mask.*use flex"),
    ("fa3", HOPPER, BF16, 64, True, "takes no mask.*use flex"),
    ("flash", HOPPER, BF16, 36, False, "a multiple of 8 and at most 256.*36"),
    ("flash", HOPPER, BF16, 264, False, "at most 256"),
    ("cudnn", AMPERE, BF16, 256, False, "at most 128"),
    ("cudnn", HOPPER, BF16, 20, False, "a multiple of 8"),
    ("efficient", HOPPER, BF16, 20, False, "a multiple of 8"),
    ("efficient", HOPPER, FP32, 6, False, "a multiple of 4"),
    ("flex", HOPPER, BF16, 8, False, "at least 16"),
    ("fa3", replace(HOPPER, fa3=False), BF16, 64, False, "not installed.*flash_attn_interface"),
    ("fa3", AMPERE, BF16, 64, False, "for Hopper.*has 8.0"),
    ("cudnn", replace(HOPPER, cudnn=False), BF16, 64, False, "no cuDNN"),
    ("flash", replace(HOPPER, capability=(7, 5)), BF16, 64, False, "needs compute capability 8.0"),
    ("flex", replace(HOPPER, triton=False), BF16, 64, False, "Triton, which is not installed"),
]


@pytest.mark.parametrize(("name", "machine", "dtype", "head_dim", "masked", "why"), REFUSED)
def test_a_kernel_that_cannot_run_is_refused_in_one_line(name, machine, dtype, head_dim, masked, why):
    said = refusal(AttentionConfig(kernel=name, document_mask=masked), head_dim, dtype, machine)
    assert said is not None and "\n" not in said and "use" in said
    with pytest.raises(UserError, match=why):
        raise UserError(said)


@pytest.mark.parametrize("name", ["auto", "math", "cudnn", "flash", "efficient", "fa3", "flex"])
def test_what_can_run_is_let(name):
    assert refusal(AttentionConfig(kernel=name), 64, BF16, HOPPER) is None
    assert refusal(AttentionConfig(kernel="math", document_mask=True), 7, FP64, CPU) is None
    assert refusal(AttentionConfig(kernel="flash", document_mask=True), 36, FP32, CPU) is None
    assert refusal(AttentionConfig(kernel="flex", document_mask=True), 64, BF16, HOPPER) is None
    assert refusal(AttentionConfig(kernel="cudnn"), 256, BF16, HOPPER) is None


@pytest.mark.parametrize("name", ["cudnn", "efficient", "fa3", "flex"])
def test_the_run_is_refused_before_anything_is_made(name, monkeypatch):
    monkeypatch.setattr(TorchSession, "__init__", lambda self, config: pytest.fail("a session was made"))
    config = tiny_config().model_copy(update={"device": "cpu", "attention": AttentionConfig(kernel=name)})
    for ask in (TorchBackend().open, TorchBackend().describe):
        with pytest.raises(UserError, match=f"^attention.kernel = '{name}' cannot run: [^\n]*$"):
            ask(config)


def drawn(dtype, requires_grad=False):
    torch.manual_seed(0)
    return [torch.randn(2, 4, 48, 16).to(dtype).requires_grad_(requires_grad) for _ in range(3)]


def operators(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        call()
    return {event.key for event in seen.key_averages() if "attention" in event.key}


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64])
def test_flash_on_the_cpu_is_torch_s_own_call(dtype):
    """Bounds were measured with it, and runs made before core/config/auto.py: bit for bit."""
    q, k, v = drawn(dtype)
    due = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for name in ("auto", "flash"):
        assert torch.equal(Kernel(name)(q, k, v), due)


KERNELS = {"math": "attention_math", "flash": "flash_attention_for_cpu", "flash_brgemm": "lockstep::attention"}


@pytest.mark.parametrize(
    ("policy", "kernel"),
    [("bf16", "math"), ("fp32", "flash"), ("bf16", "flash_brgemm"), ("fp32", "flash_brgemm")],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_kernel_that_auto_stands_for_runs(policy, kernel, compiled, monkeypatch):
    """Forward and backward of a session, and its validation."""
    by_blocks = kernel == "flash_brgemm"
    if by_blocks and not has_cpp_compiler():
        pytest.skip("no C++ compiler")
    of_bf16 = builds_bf16_products()
    monkeypatch.setattr(auto, "builds_bf16_products", lambda: of_bf16 and by_blocks)
    monkeypatch.setattr(auto, "has_cpp_compiler", lambda: by_blocks)
    monkeypatch.setattr(auto, "multiplies_bf16", lambda: False)
    if policy == "fp32":
        monkeypatch.setattr(auto, "vendor", lambda: "AuthenticAMD")
        monkeypatch.setattr(auto, "has_avx512", lambda: True)
    session = TorchBackend().open(tiny_config(policy, compiled, layers=1).model_copy(update={"device": "cpu"}))
    batch = text_batch(session.config)
    found = operators(lambda: (session.step(batch), session.evaluate(batch)))
    assert {name for name, part in KERNELS.items() if any(part in key for key in found)} == {kernel}


DOCUMENTS = torch.arange(48).div(20, rounding_mode="floor").expand(2, 48)


@pytest.mark.parametrize("program", ["eager", "aot_eager"])
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize(
    ("name", "operator"),
    [("auto", "_flash_attention_for_cpu"), ("flash", "_flash_attention_for_cpu"), ("math", "_math")],
)
def test_the_kernel_that_was_asked_for_runs(name, operator, masked, program):
    kernel = Kernel(name)

    def attend(q, k, v, documents):
        return kernel(q, k, v, kernel.mask(documents) if masked else None)

    if program != "eager":
        torch._dynamo.reset()
        attend = torch.compile(attend, backend=program, fullgraph=True, dynamic=False)
    q, k, v = drawn(BF16, requires_grad=True)
    found = operators(lambda: attend(q, k, v, DOCUMENTS).sum().backward())
    assert (
        f"aten::_scaled_dot_product{operator}" in found
        if operator != "_math"
        else any(key.endswith("attention_math") for key in found)
    )
    assert not any("flash" in key for key in found) or operator != "_math"


@pytest.mark.parametrize("name", ["auto", "flash", "math"])
def test_every_kernel_is_the_formula(name):
    q, k, v = drawn(FP64)
    for mask, seen in ((None, torch.ones(48, 48).tril().bool()), (document_mask(DOCUMENTS), document_mask(DOCUMENTS))):
        scores = (q @ k.mT / 4).masked_fill(~seen, -torch.inf)
        torch.testing.assert_close(Kernel(name)(q, k, v, mask), scores.softmax(-1) @ v, rtol=0, atol=1e-13)


def test_another_precision_than_the_kernel_takes_goes_to_what_can():
    """`evaluate` under fp32 of a run in bf16."""
    assert Kernel("cudnn").backends("cuda", BF16) == [SDPBackend.CUDNN_ATTENTION]
    assert Kernel("cudnn").backends("cuda", FP32) == list(BACKENDS.values())
    assert Kernel("math").backends("cuda", FP64) == [SDPBackend.MATH]
    assert Kernel("auto").backends("cuda", BF16)[0] == SDPBackend.CUDNN_ATTENTION
    assert Kernel("fa3").backends("cuda", FP32) == list(BACKENDS.values())
    assert Kernel("auto").backends("cpu", BF16) == []


def test_what_is_in_force_is_said(monkeypatch):
    monkeypatch.setattr(auto, "has_cpp_compiler", lambda: False)
    monkeypatch.setattr(auto, "builds_bf16_products", lambda: False)
    config = tiny_config().model_copy(update={"device": "cpu"})
    assert TorchBackend().describe(config)["in_force"]["attention"] == "scaled_dot_product_attention, math kernel"
    cuda = torch.device("cuda")
    both = AttentionConfig(kernel="flex", document_mask=True, reset_positions=True)
    assert in_force(both, cuda) == "flex_attention; documents kept apart by blocks; positions from 0 in each document"
    assert "cuDNN" in in_force(AttentionConfig(), cuda)
    assert "math kernel; documents kept apart by a dense mask" in in_force(
        AttentionConfig(kernel="math", document_mask=True), torch.device("cpu")
    )


def test_flex_s_blocks_are_the_mask():
    """Its forward runs on the CPU, inside one compiled program as in training."""
    kernel = Kernel("flex")
    q, k, v = drawn(FP32)
    documents = DOCUMENTS.contiguous()

    def attend(q, k, v, documents):
        return kernel(q, k, v, kernel.mask(documents))

    with torch.no_grad():
        found = torch.compile(attend, fullgraph=True, dynamic=False)(q, k, v, documents)
    torch.testing.assert_close(found, Kernel()(q, k, v, document_mask(documents)), rtol=0, atol=1e-6)
