"""Products with FP32 results by oneDNN's block product: exact where sums are, whatever the strides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lockstep.core.config import auto
from lockstep.core.config.auto import builds_bf16_products, has_cpp_compiler, settled
from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.parity_tests.cross.variants import relative
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.kernels import wide_product as block_product
from lockstep.torch_backend.kernels.chunked_loss import chunked_loss
from lockstep.torch_backend.precision import POLICIES, products_in_force

runs_here = pytest.mark.skipif(not builds_bf16_products(), reason="no x86 instructions for bf16, or no C++ compiler")
builds = pytest.mark.skipif(not has_cpp_compiler(), reason="no C++ compiler")
OPERANDS = [
    pytest.param(torch.bfloat16, marks=runs_here, id="bf16"),
    pytest.param(torch.float32, marks=builds, id="fp32"),
]


def transposed(draw):
    """Draw the same shape as (rows, columns), with contiguous columns."""
    return lambda rows, columns: draw(columns, rows).T


def strided(draw):
    """Draw the same shape, of every second number of a row."""
    return lambda rows, columns: draw(rows, 2 * columns)[:, ::2]


def integers(rows, columns):
    """Draw integers whose sums of products FP32 holds exactly, in any order."""
    return torch.randint(-8, 9, (rows, columns)).bfloat16()


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("right", [integers, transposed(integers), strided(integers)], ids=["rows", "columns", "steps"])
@pytest.mark.parametrize("left", [integers, transposed(integers), strided(integers)], ids=["rows", "columns", "steps"])
def test_exact_in_every_layout(left, right, operand):
    """Sizes below, at and above the blocks of 64 or 128 columns, 128 rows and 512 terms; odd ones, and none."""
    for m, k, n in [
        (1, 1, 1),
        (3, 5, 7),
        (128, 64, 64),
        (129, 33, 65),
        (300, 129, 130),
        (2, 300, 64),
        (130, 513, 140),
        (3, 1024, 257),
        (4, 0, 3),
        (0, 2, 3),
    ]:
        a, b = left(m, k), right(k, n)
        if operand != a.dtype:
            a, b = (torch.empty_strided(x.shape, x.stride(), dtype=operand).copy_(x) for x in (a, b))
        exact = a.float() @ b.float()
        made = block_product.wide_product(a, b)
        assert made.dtype == torch.float32 and torch.equal(made, exact)
        block_product.add_wide_product(made, a, b)
        assert torch.equal(made, 2 * exact)


@pytest.mark.parametrize("operand", OPERANDS)
def test_sums_are_of_fp32(operand):
    """|error| ≤ k · 2⁻²⁴ · |A|·|B|; a sum or a result in bf16 would be 2⁻⁹ off."""
    a, b = torch.randn(70, 512).to(operand), torch.randn(512, 90).to(operand)
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    product = block_product.wide_product(a, b)
    assert ((product - exact).abs() <= 512 * 2.0**-24 * size).all()
    total = torch.randn(70, 90)
    separate = total + product
    block_product.add_wide_product(total, a, b)
    assert torch.equal(total, separate)


@runs_here
def test_what_it_does_not_multiply_is_refused():
    a, b = integers(4, 6), integers(6, 5)
    with pytest.raises(ValueError, match=r"\(4, 6\) · \(5, 6\) is not"):
        block_product.wide_product(a, b.T)
    for wrong in (a.double(), b.double()), (a.float(), b), (a.half(), b.half()):
        with pytest.raises(ValueError, match="bf16 or FP32 into a contiguous FP32"):
            block_product.wide_product(*wrong)
    with pytest.raises(ValueError, match="bf16 or FP32 into a contiguous FP32"):
        block_product.add_wide_product(torch.zeros(5, 4).T, a, b)


def config_of(library, head="chunked", compiled=False):
    config = tiny_config("bf16", hidden=256, ffn_hidden=512).model_copy(update={"device": "cpu"})
    return config.model_copy(
        update={
            "precision": config.precision.model_copy(update={"cpu_products": library}),
            "loss": config.loss.model_copy(update={"head": head, "chunk": 50}),
            "compile": config.compile.model_copy(update={"enabled": compiled, "backend": "aot_eager"}),
        }
    )


@runs_here
@pytest.mark.parametrize("head", ["full", "chunked"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_only_orders_of_sums_differ(head, compiled, monkeypatch):
    """Sums of 256 terms: √256 · 2⁻²⁴ a product, then rounded to bf16 in what follows. All products go this way."""
    seen, real = [], block_product._multiply
    monkeypatch.setattr(block_product, "_multiply", lambda *of, **more: seen.append(of[0].shape) or real(*of, **more))
    batch = uneven_weights(text_batch(config_of("blas")), 1)
    blas, blocks = (TorchBackend().open_rank(config_of(name, head, compiled)) for name in ("blas", "brgemm"))
    expected = blas.gradients(batch)
    assert not seen
    found = blocks.gradients(batch)
    # Two micro-batches of 64 tokens, in chunks of 50.
    chunks = 2 if head == "chunked" else 1
    assert len(seen) == 2 * 2 * chunks
    apart = {name: relative(grad, expected.grads[name]) for name, grad in found.grads.items()}
    assert len(apart) == len(expected.grads) and max(apart.values()) <= 32 * 2.0**-9, apart
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert np.array_equal(blocks.evaluate(batch, "fp32")["nll"], blas.evaluate(batch, "fp32")["nll"])


@runs_here
def test_a_compiled_program_adds_in_place_what_the_eager_one_does():
    policy = replace(POLICIES["bf16"], library="brgemm")
    weights, targets = torch.ones(2, 12), torch.randint(0, 90, (2, 12))

    def gradients(of):
        torch.manual_seed(0)
        x, weight = torch.randn(2, 12, 64, requires_grad=True), torch.randn(90, 64, requires_grad=True)
        of(x, weight).backward()
        return x.grad, weight.grad

    def loss(x, weight):
        return chunked_loss(x, weight, targets, weights, weights.sum().double(), policy, 0.0, 5, None)[0]

    eager, compiled = gradients(loss), gradients(torch.compile(loss, fullgraph=True, backend="aot_eager"))
    assert all(map(torch.equal, eager, compiled))


@pytest.mark.parametrize(
    ("flags", "compiler", "policy", "compiled", "library"),
    [
        ("avx2 avx512_bf16", True, "bf16", False, "brgemm"),
        ("avx2 amx_bf16", True, "bf16", True, "brgemm"),
        ("avx2 avx512_bf16", True, "fp8_tensorwise", False, "brgemm"),
        ("avx2 avx512f", True, "bf16", False, "blas"),
        ("avx2 avx512_bf16", False, "bf16", False, "blas"),
        ("avx2 avx512_bf16", True, "fp32", False, "blas"),
        ("avx2 avx512_bf16", True, "fp16", False, "auto"),
        ("", True, "bf16", False, "blas"),
    ],
)
def test_auto(flags, compiler, policy, compiled, library, monkeypatch):
    monkeypatch.setattr(auto, "_reported", {"flags": flags, "vendor_id": "GenuineIntel"}.get)
    monkeypatch.setattr(auto.shutil, "which", lambda name: "/bin/" + name if compiler else None)
    config = tiny_config(policy)
    config = config.model_copy(update={"compile": config.compile.model_copy(update={"enabled": compiled})})
    made = settled(config, "cpu")
    assert made.precision.cpu_products == library
    told = products_in_force(made, torch.device("cpu")).get("bf16 products with FP32 results")
    copies = "from FP32 copies of their operands" if library == "blas" and policy == "bf16" else None
    assert told == ("oneDNN's block product" if library == "brgemm" else copies)


def test_what_a_run_recorded_stays_in_force(monkeypatch):
    """Runs from before the block product recorded a library that bf16 did not use; they go on as they were."""
    monkeypatch.setattr(auto, "builds_bf16_products", lambda: True)
    config = tiny_config("bf16")
    for before in ("onednn", "blas"):
        assert settled(config, "cpu", {"precision.cpu_products": before}).precision.cpu_products == "blas"
    assert settled(config, "cpu", {}).precision.cpu_products == "blas"
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(auto, "builds_bf16_products", lambda: False)
        made = settled(config, "cpu", {"precision.cpu_products": "brgemm"})
        assert made.precision.cpu_products == "blas" and settled(made, "cpu") == made
    recorded = settled(config, "cpu", {"precision.cpu_products": "brgemm"})
    assert recorded.precision.cpu_products == "brgemm"
    # Opened elsewhere, or under another policy.
    assert settled(recorded, "cuda").precision.cpu_products == "auto"
    in_fp16 = recorded.model_copy(update={"precision": recorded.precision.model_copy(update={"policy": "fp16"})})
    assert settled(in_fp16, "cpu").precision.cpu_products == "auto"


@pytest.mark.parametrize("error", [RuntimeError("g++ failed\nno such file"), OSError("noexec"), MemoryError()])
def test_a_build_that_fails_is_told_in_one_line(error, monkeypatch):
    from torch._inductor.codecache import CppCodeCache

    def load(*given, **options):
        raise error

    monkeypatch.setattr(CppCodeCache, "load", load)
    block_product.build.cache_clear()
    try:
        with pytest.raises(UserError, match=r"'brgemm' cannot be used on this machine \(.*\); take 'blas'") as raised:
            TorchBackend().open_rank(config_of("brgemm"))
        assert len(raised.value.lines) == 1
    finally:
        block_product.build.cache_clear()
