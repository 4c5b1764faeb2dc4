"""Attention by oneDNN's block product: the formula in every shape and layout, and gradients summed in FP32."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lockstep.core.config.auto import builds_bf16_products, settled
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

runs_here = pytest.mark.skipif(not builds_bf16_products(), reason="no x86 instructions for bf16, or no C++ compiler")

# Batch, heads of queries, heads of keys, length, width: below, at and above blocks of 64, 128, 256 and 512; odd ones.
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


def drawn(batch: int, heads: int, of_keys: int, length: int, width: int, by_tokens: bool) -> list[Tensor]:
    """Draw q, k, v and the gradient of the output (B, H, S, E); by_tokens: a token's heads lie side by side."""
    torch.manual_seed(length)
    made = []
    for count in (heads, of_keys, of_keys, heads):
        shape = (batch, length, count, width) if by_tokens else (batch, count, length, width)
        x = torch.randn(shape).bfloat16()
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


@runs_here
@pytest.mark.parametrize("by_tokens", [True, False], ids=["tokens", "heads"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_formula(shape, by_tokens):
    """Each result is rounded once, and P and dS once before: some roundings of 2⁻⁹, in random directions."""
    given, scale = drawn(*shape, by_tokens), 1.3 / math.sqrt(shape[-1])
    made = with_gradients(lambda *qkv: blocks.block_attention(*qkv, scale), *given)
    for ours, truth in zip(made, exact(*given, scale), strict=True):
        assert ours.dtype == torch.bfloat16 and ours.shape == truth.shape
        assert (ours.double() - truth).norm() <= 2 * 2.0**-9 * truth.norm()


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


@runs_here
def test_a_query_sees_no_later_key():
    """Later keys and values change no bit of earlier rows, whatever they are."""
    q, k, v, _ = drawn(1, 2, 2, 300, 32, True)
    before = blocks.block_attention(q, k, v, 0.2)
    k, v = k.clone(), v.clone()
    k[:, :, 200:], v[:, :, 200:] = math.nan, 1e30
    after = blocks.block_attention(q, k, v, 0.2)
    assert torch.equal(before[:, :, :200], after[:, :, :200]) and after[:, :, 200:].isnan().all()


@runs_here
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_lost(bad):
    given = drawn(1, 1, 1, 70, 16, True)
    for which in range(4):
        broken = [x.clone() for x in given]
        broken[which][0, 0, 3, 5] = bad
        made = with_gradients(lambda *qkv: blocks.block_attention(*qkv, 0.25), *broken)
        assert any(not x.isfinite().all() for x in made), which


@runs_here
def test_large_scores_and_empty_batches():
    """Scores of ± 10⁴ need the largest one taken away. A batch of no sequences gives one."""
    q, k, v, grad = drawn(1, 2, 2, 130, 32, True)
    made, truth = (
        with_gradients(Kernel("flash_brgemm"), 300 * q, k, v, grad),
        exact(300 * q, k, v, grad, 1 / math.sqrt(32)),
    )
    assert (made[0].double() - truth[0]).norm() <= 2 * 2.0**-9 * truth[0].norm()
    assert blocks.block_attention(q[:0], k[:0], v[:0], 1.0).shape == (0, 2, 130, 32)


@runs_here
def test_strides_that_the_product_cannot_read():
    """Elements that do not lie side by side, and rows that are one row."""
    q, k, v, grad = drawn(1, 2, 2, 40, 16, True)
    odd = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v, grad)]
    call = Kernel("flash_brgemm")
    assert all(map(torch.equal, with_gradients(call, *odd), with_gradients(call, q, k, v, grad)))
    row = grad[:, :, :1].expand_as(grad)
    assert all(map(torch.equal, with_gradients(call, q, k, v, row), with_gradients(call, q, k, v, row.contiguous())))


def config_of(kernel, compiled=None, **model):
    config = tiny_config("bf16", **model).model_copy(update={"device": "cpu"})
    program = {"enabled": True, "backend": compiled} if compiled else {}
    return config.model_copy(
        update={
            "attention": config.attention.model_copy(update={"kernel": kernel}),
            "compile": config.compile.model_copy(update=program),
        }
    )


@runs_here
@pytest.mark.parametrize("compiled", [None, "aot_eager", "inductor"])
def test_it_runs_where_it_was_asked_for(compiled):
    """Once a layer and pass, eager or compiled, and compiled with the gradients of eager steps but for fusions."""
    session = TorchBackend().open_rank(config_of("flash_brgemm", compiled))
    batch = text_batch(session.config)
    found = session.gradients(batch)
    with torch.autograd.profiler.profile() as profile:
        session.gradients(batch)
    micros = len(batch.cut(session.config.train))
    for name in ("attention", "attention_backward"):
        calls = sum(event.name == f"lockstep::{name}" for event in profile.function_events)
        assert calls == micros * session.config.model.layers
    eager = TorchBackend().open_rank(config_of("flash_brgemm")).gradients(batch)
    apart = {name: relative(grad, eager.grads[name]) for name, grad in found.grads.items()}
    assert max(apart.values()) <= (0.02 if compiled == "inductor" else 0.0), apart


def checked(kernel="auto"):
    config = config_of(kernel)
    (check,) = check_steps(TorchBackend(), JaxBackend(), config, [text_batch(config)])
    return check


@runs_here
def test_a_clean_run_agrees():
    assert checked().verdict == "agreed"


@runs_here
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
def test_a_wrong_kernel_is_found_and_named(pass_, argument, wrong, monkeypatch):
    real = blocks.build()

    def planted(*given):
        changed = list(given)
        changed[argument] = wrong(changed[argument])
        return getattr(real, pass_)(*changed)

    names = "lockstep_attention", "lockstep_attention_backward"
    kernels = {name: planted if name == pass_ else getattr(real, name) for name in names}
    monkeypatch.setattr(blocks, "build", lambda: SimpleNamespace(**kernels))
    check = checked()
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
