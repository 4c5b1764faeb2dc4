"""Attention by oneDNN's block product: the formula in every shape and layout, and gradients summed in FP32."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lockstep.core.config.auto import has_cpp_compiler, settled
from lockstep.core.errors import UserError
from lockstep.core.parity.modes.side_by_side import check_steps
from lockstep.jax_backend.backend import JaxBackend
from lockstep.jax_backend.session import kernel_followed
from lockstep.parity_tests.cross.variants import relative
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.attention import Kernel
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.kernels import block_attention as blocks
from lockstep.torch_backend.kernels import cpp

BF16, FP32 = torch.bfloat16, torch.float32
runs_here = pytest.mark.skipif(not has_cpp_compiler(), reason="no C++ compiler")
in_both = pytest.mark.parametrize("dtype", [pytest.param(x, marks=runs_here, id=str(x)[6:]) for x in (BF16, FP32)])

# Batch, heads of queries, heads of keys, length, width: below, at and above blocks of 32 to 512; odd ones.
SHAPES = [
    (1, 1, 1, 1, 2),
    (2, 3, 3, 17, 80),
    (2, 2, 1, 77, 48),
    (1, 2, 2, 128, 32),
    (1, 4, 2, 257, 64),
    (1, 1, 1, 511, 16),
    (1, 6, 2, 512, 8),
    (1, 1, 1, 1025, 64),
]
ODD_WIDTHS = [(1, 1, 1, 1, 1), (2, 2, 1, 77, 45), (1, 3, 3, 130, 7), (1, 2, 1, 600, 33)]
CASES = [
    pytest.param(dtype, shape, marks=runs_here, id=f"{str(dtype)[6:]}-{shape}")
    for dtype, shapes in ((BF16, SHAPES), (FP32, SHAPES + ODD_WIDTHS))
    for shape in shapes
]


def drawn(
    batch: int, heads: int, of_keys: int, length: int, width: int, by_tokens: bool, dtype: torch.dtype = BF16
) -> list[Tensor]:
    """Draw q, k, v and the gradient of the output (B, H, S, E); by_tokens: a token's heads lie side by side."""
    torch.manual_seed(length)
    made = []
    for count in (heads, of_keys, of_keys, heads):
        shape = (batch, length, count, width) if by_tokens else (batch, count, length, width)
        x = torch.randn(shape).to(dtype)
        made.append(x.transpose(1, 2) if by_tokens else x)
    return made


def exact(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, scale: float) -> list[Tensor]:
    """Return the output and the gradients of q, k and v in FP64."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * scale
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    out = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v.repeat_interleave(group, 1)
    out.backward(grad.double())
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return [out.detach(), q.grad, k.grad, v.grad]


def with_gradients(call, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = call(q, k, v)
    out.backward(grad)
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return [out.detach(), q.grad, k.grad, v.grad]


def rounding(dtype: torch.dtype, shape: tuple[int, ...]) -> float:
    """Return the relative error that results may have.

    bf16: each result is rounded once, and P and dS once before: some roundings of 2⁻⁹, in random directions.
    FP32: a sum of n numbers is rounded n times, by up to 2⁻²⁴, in random directions: √n·2⁻²⁴. Each result is a sum over
    positions of sums over a width. Measured over seeds: 0.24 to 0.68 of √(S + E)·2⁻²⁴.
    """
    return 2 * (2.0**-9 if dtype == BF16 else math.sqrt(shape[-2] + shape[-1]) * 2.0**-24)


@pytest.mark.parametrize("by_tokens", [True, False], ids=["tokens", "heads"])
@pytest.mark.parametrize(("dtype", "shape"), CASES)
def test_the_formula(dtype, shape, by_tokens):
    given, scale = drawn(*shape, by_tokens, dtype), 1.3 / math.sqrt(shape[-1])
    made = with_gradients(lambda *qkv: blocks.block_attention(*qkv, scale), *given)
    for ours, truth in zip(made, exact(*given, scale), strict=True):
        assert ours.dtype == dtype and ours.shape == truth.shape
        # The weight of a single key is 1, and the gradients of q and k are 0: a difference of two sums near 1.
        size = max(float(truth.norm()), 1.0 if dtype == FP32 and shape[3] == 1 else 0.0)
        assert (ours.double() - truth).norm() <= rounding(dtype, shape) * size


@runs_here
@pytest.mark.parametrize("shape", SHAPES[::3], ids=str)
def test_the_formula_of_bf16_numbers_in_32_bits(shape, monkeypatch):
    """Those of a processor without bf16 instructions."""
    monkeypatch.setattr(blocks, "builds_bf16_products", lambda: False)
    given, scale = drawn(*shape, True, BF16), 1.3 / math.sqrt(shape[-1])
    made = with_gradients(lambda *qkv: blocks.block_attention(*qkv, scale), *given)
    for ours, truth in zip(made, exact(*given, scale), strict=True):
        assert ours.dtype == BF16 and (ours.double() - truth).norm() <= rounding(BF16, shape) * max(truth.norm(), 1e-3)


@runs_here
def test_gradients_of_keys_are_summed_in_fp32():
    """Torch's kernel adds 8 blocks of 64 queries in bf16, and is twice as far from the truth."""
    given = drawn(1, 8, 8, 512, 64, True)
    truth = exact(*given, 1 / 8)
    ours = with_gradients(Kernel("flash_brgemm"), *given)
    torchs = with_gradients(Kernel("flash"), *given)
    for which in (2, 3):
        error, of_torch = (float((made[which].double() - truth[which]).norm()) for made in (ours, torchs))
        assert error < 0.65 * of_torch


@in_both
def test_a_query_sees_no_later_key(dtype):
    """Later keys and values change no bit of earlier rows, whatever they are."""
    q, k, v, _ = drawn(1, 2, 2, 300, 32, True, dtype)
    before = blocks.block_attention(q, k, v, 0.2)
    k, v = k.clone(), v.clone()
    k[:, :, 200:], v[:, :, 200:] = math.nan, 1e30
    after = blocks.block_attention(q, k, v, 0.2)
    assert torch.equal(before[:, :, :200], after[:, :, :200]) and after[:, :, 200:].isnan().all()


@in_both
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_lost(bad, dtype):
    given = drawn(1, 1, 1, 70, 16, True, dtype)
    for which in range(4):
        broken = [x.clone() for x in given]
        broken[which][0, 0, 3, 5] = bad
        made = with_gradients(lambda *qkv: blocks.block_attention(*qkv, 0.25), *broken)
        assert any(not x.isfinite().all() for x in made), which


@in_both
def test_large_scores_and_empty_batches(dtype):
    """Scores of ± 10³ need the largest one taken away. A batch of no sequences gives one.

    In FP32 a score is off by its own rounding, and a weight by as much. Measured over seeds: 0.01 to 0.07 of the
    largest score's rounding.
    """
    q, k, v, grad = drawn(1, 2, 2, 130, 32, True, dtype)
    scale = 1 / math.sqrt(32)
    made = blocks.block_attention(300 * q, k, v, scale)
    truth = exact(300 * q, k, v, grad, scale)[0]
    largest = float((300 * q @ k.transpose(-1, -2) * scale).abs().max())
    assert largest > 1000
    bound = 2 * 2.0**-9 if dtype == BF16 else largest * 2.0**-24 / 4
    assert (made.double() - truth).norm() <= bound * truth.norm()
    assert blocks.block_attention(q[:0], k[:0], v[:0], 1.0).shape == (0, 2, 130, 32)


def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return blocks.block_attention(q, k, v, 0.25)


@in_both
def test_strides_that_the_product_cannot_read(dtype):
    """Elements that do not lie side by side, and rows that are one row."""
    q, k, v, grad = drawn(1, 2, 2, 40, 16, True, dtype)
    odd = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v, grad)]
    assert all(map(torch.equal, with_gradients(call, *odd), with_gradients(call, q, k, v, grad)))
    row = grad[:, :, :1].expand_as(grad)
    assert all(map(torch.equal, with_gradients(call, q, k, v, row), with_gradients(call, q, k, v, row.contiguous())))


@in_both
def test_operands_that_lie_in_one_tensor(dtype):
    """Rows of q, k and v one after another, as a fused projection returns them: what lies between is not read."""
    torch.manual_seed(0)
    fused = torch.randn(2, 150, 3, 2, 18).to(dtype)
    apart = fused.unbind(2)
    q, k, v = (x.transpose(1, 2) for x in apart)
    grad = torch.randn(2, 2, 150, 20).to(dtype)[..., 1:19]
    copies = [x.contiguous() for x in (q, k, v, grad)]
    assert all(map(torch.equal, with_gradients(call, q, k, v, grad), with_gradients(call, *copies)))


@pytest.mark.parametrize(
    ("dtypes", "k", "v", "why"),
    [
        ((torch.float64,) * 3, (1, 2, 8, 6), (1, 2, 8, 6), "all bf16 or all FP32, not float64"),
        ((FP32, BF16, FP32), (1, 2, 8, 6), (1, 2, 8, 6), "not bfloat16 and float32"),
        ((FP32,) * 3, (1, 2, 8, 6), (1, 2, 8, 4), r"\(1, 2, 8, 4\) do not fit together"),
        ((FP32,) * 3, (1, 2, 9, 6), (1, 2, 9, 6), "do not fit together"),
        ((FP32,) * 3, (1, 3, 8, 6), (1, 3, 8, 6), "do not fit together"),
        ((FP32,) * 3, (2, 2, 8, 6), (2, 2, 8, 6), "do not fit together"),
    ],
)
def test_other_operands_are_refused(dtypes, k, v, why):
    shapes = (1, 4, 8, 6), k, v
    with pytest.raises(ValueError, match=why):
        blocks.block_attention(*(torch.ones(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)), 1.0)


def test_odd_widths_of_bf16_are_refused():
    with pytest.raises(ValueError, match="heads are 5 wide: odd"):
        blocks.block_attention(*torch.ones(3, 1, 2, 8, 5, dtype=BF16), 1.0)


POLICIES = [pytest.param("bf16", marks=runs_here), pytest.param("fp32", marks=runs_here)]


def config_of(kernel, compiled=None, policy="bf16"):
    config = tiny_config(policy).model_copy(update={"device": "cpu"})
    program = {"enabled": True, "backend": compiled} if compiled else {}
    return config.model_copy(
        update={
            "attention": config.attention.model_copy(update={"kernel": kernel}),
            "compile": config.compile.model_copy(update=program),
        }
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("compiled", [None, "aot_eager", "inductor"])
def test_it_runs_where_it_was_asked_for(compiled, policy):
    """Once a layer and pass, eager or compiled, and compiled with the gradients of eager steps but for fusions."""
    session = TorchBackend().open_rank(config_of("flash_brgemm", compiled, policy))
    batch = text_batch(session.config)
    found = session.gradients(batch)
    with torch.autograd.profiler.profile() as profile:
        session.gradients(batch)
    micros = len(batch.cut(session.config.train))
    for name in ("attention", "attention_backward"):
        calls = sum(event.name == f"lockstep::{name}" for event in profile.function_events)
        assert calls == micros * session.config.model.layers
    eager = TorchBackend().open_rank(config_of("flash_brgemm", policy=policy)).gradients(batch)
    apart = {name: relative(grad, eager.grads[name]) for name, grad in found.grads.items()}
    assert max(apart.values()) <= (0.02 if compiled == "inductor" else 0.0), apart


def checked(policy):
    config = config_of("flash_brgemm", policy=policy)
    (check,) = check_steps(TorchBackend(), JaxBackend(), config, [text_batch(config)])
    return check


@pytest.mark.parametrize("policy", POLICIES)
def test_an_evaluation_has_it_in_the_runs_format_and_in_fp32(policy):
    """A processor of an FP32 run may lack the product of bf16; there is none of FP64."""
    session = TorchBackend().open_rank(config_of("flash_brgemm", policy=policy))
    batch = text_batch(session.config)
    for other in ("fp32", "bf16", "fp64"):
        with torch.autograd.profiler.profile() as profile:
            session.evaluate(batch, other)
        called = any(event.name == "lockstep::attention" for event in profile.function_events)
        assert called is (other in ("fp32", policy)), other


@pytest.mark.parametrize("policy", POLICIES)
def test_a_clean_run_agrees(policy):
    assert checked(policy).verdict == "agreed"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("pass_", "argument", "wrong"),
    [
        ("lockstep_attention", -1, lambda scale: 1.02 * scale),
        ("lockstep_attention_backward", -1, lambda scale: 1.02 * scale),
        # The logsumexp of the forward pass, each row's of the row before.
        ("lockstep_attention_backward", 5, lambda address: address - 4),
    ],
    ids=["scale", "scale of the gradients", "logsumexp of the row before"],
)
def test_a_wrong_kernel_is_found_and_named(pass_, argument, wrong, policy, monkeypatch):
    real = blocks.build({"bf16": BF16, "fp32": FP32}[policy])

    def planted(*given):
        changed = list(given)
        changed[argument] = wrong(changed[argument])
        return getattr(real, pass_)(*changed)

    names = "lockstep_attention", "lockstep_attention_backward"
    kernels = {name: planted if name == pass_ else getattr(real, name) for name in names}
    monkeypatch.setattr(blocks, "build", lambda dtype: SimpleNamespace(**kernels))
    check = checked(policy)
    assert check.verdict == "disagreed" and check.origin is not None
    assert check.origin.stage == "attn"
    assert check.origin.phase == ("backward" if "backward" in pass_ else "forward")


@runs_here
def test_auto_takes_it_and_the_table_names_it():
    config = config_of("auto")
    assert settled(config, "cpu").attention.kernel == "flash_brgemm"
    assert "block product" in TorchBackend().describe(config)["in_force"]["attention"]


def test_the_twin_sums_in_fp32_too():
    """In a sequence of one block of queries the twin of torch's kernel would not differ."""
    assert kernel_followed(config_of("flash_brgemm")) == "wide"
    assert kernel_followed(config_of("flash")) == "cpu"
    assert "Lockstep's kernel" in JaxBackend().describe(config_of("flash_brgemm"))["in_force"]["attention"]


def test_a_build_that_fails_is_told_in_one_line(monkeypatch):
    def library(source):
        raise cpp.NotBuilt("no such file")

    monkeypatch.setattr(blocks, "library", library)
    blocks.build.cache_clear()
    try:
        with pytest.raises(
            UserError, match=r"'flash_brgemm' cannot be used on this machine \(no such file\); take 'flash'"
        ):
            TorchBackend().open(config_of("flash_brgemm"))
    finally:
        blocks.build.cache_clear()


def test_the_product_of_the_operands_dtype_is_tried(monkeypatch):
    """A processor may have the FP32 product and lack the one of bf16."""

    def attention(*given):
        return b"no product of bf16\nand more" if given[-2] == blocks.IN_BF16 else None

    monkeypatch.setattr(blocks, "builds_bf16_products", lambda: True)

    both = SimpleNamespace(lockstep_attention=attention, lockstep_attention_backward=lambda *given: None)
    monkeypatch.setattr(blocks, "library", lambda source: both)
    blocks.build.cache_clear()
    try:
        assert blocks.build(FP32) is both
        with pytest.raises(UserError, match=r"cannot be used on this machine \(no product of bf16\); take 'flash'"):
            blocks.build(BF16)
    finally:
        blocks.build.cache_clear()
