"""FP32 products by oneDNN, whole or in blocks: another order of sums at most, in force wherever it was asked for."""

from __future__ import annotations

import platform
import sys

import numpy as np
import pytest
import torch

from lockstep.core.config import auto
from lockstep.core.config.auto import has_cpp_compiler, settled
from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.modes.side_by_side import check_steps
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.cross.variants import relative
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend import precision
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.kernels import wide_product as block_product

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
with_compiler = pytest.mark.skipif(not has_cpp_compiler(), reason="no C++ compiler")


def opened(products, policy, head="chunked", compiled=None, **model):
    config = tiny_config(policy, hidden=256, ffn_hidden=512, **model).model_copy(update={"device": "cpu"})
    program = {"enabled": True, "backend": compiled} if compiled else {}
    config = config.model_copy(
        update={
            "precision": config.precision.model_copy(update={"cpu_products": products}),
            "loss": config.loss.model_copy(update={"head": head, "chunk": 50}),
            "compile": config.compile.model_copy(update=program),
        }
    )
    return TorchBackend().open_rank(config), uneven_weights(text_batch(config), 1)


def gradients(*asked, **settings):
    session, batch = opened(*asked, **settings)
    return session.gradients(batch)


def library_of(config, chosen=None, device="cpu"):
    return precision.policy_of(settled(config, device, chosen)).library


@pytest.mark.parametrize("head", ["full", "chunked"])
@pytest.mark.parametrize(
    ("library", "policy"),
    [("onednn", "fp32"), ("onednn", "bf16"), ("onednn", "fp64"), pytest.param("brgemm", "fp32", marks=with_compiler)],
)
def test_orders_of_sums_are_all_that_differs(library, policy, head):
    """The longest sum has 512 terms: √512 · 2⁻²⁴ a product, a few times that through the chain; FP64 is not touched."""
    blas, other = (gradients(which, policy, head, qkv_bias=True) for which in ("blas", library))
    limit = {"fp32": 32 * np.sqrt(512) * 2.0**-24, "bf16": 32 * 2.0**-9, "fp64": 0.0}[policy]
    apart = {name: relative(grad, blas.grads[name]) for name, grad in other.grads.items()}
    assert len(apart) == len(blas.grads) and max(apart.values()) <= limit, apart
    assert other.loss == pytest.approx(blas.loss, rel=1e-6 if policy != "bf16" else 1e-4)


OPERATIONS = {"onednn": ("product_by_onednn",), "brgemm": ("wide_product", "add_wide_product")}


@pytest.mark.parametrize("library", ["onednn", pytest.param("brgemm", marks=with_compiler)])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_program_has_the_products_of_eager_steps(library, backend):
    """Gradients differ from eager's by the program's fusions, and not by a library."""
    found, calls = {}, {}
    names = [f"lockstep::{name}" for name in OPERATIONS[library]]
    for which in (None, backend):
        session, batch = opened(library, "fp32", compiled=which)
        session.gradients(batch)  # the compiler's own calls have the operation's name too
        with torch.autograd.profiler.profile() as profile:
            found[which] = session.gradients(batch)
        calls[which] = sum(event.name in names for event in profile.function_events)
    apart = {name: relative(grad, found[None].grads[name]) for name, grad in found[backend].grads.items()}
    assert max(apart.values()) <= (0.0 if backend == "aot_eager" else 32 * 2.0**-24), apart
    assert calls[backend] == calls[None] > 0


@with_compiler
def test_every_fp32_product_is_in_blocks(monkeypatch):
    """Three products a linear and two micro-batches; of the head, three a chunk of 50 tokens, one of them added."""
    seen, real = [], block_product._multiply
    monkeypatch.setattr(block_product, "_multiply", lambda *of, **more: seen.append(more["add"]) or real(*of, **more))
    gradients("brgemm", "fp32")
    chunks = -(-2 * 32 // 50)
    assert (seen.count(False), seen.count(True)) == (2 * (3 * 14 + 2 * chunks), 2 * chunks)


@with_compiler
@pytest.mark.parametrize(("added", "stage", "phase"), [(False, "q", "forward"), (True, "logits", "backward")])
def test_a_wrong_block_product_is_found(added, stage, phase, monkeypatch):
    """By 1e-4: in every linear layer, or only where the head's chunks add to the gradient of its weight."""
    real = block_product._multiply

    def wrong(total, left, right, *, add):
        return real(total, left * (1.0001 if add is added else 1.0), right, add=add)

    monkeypatch.setattr(block_product, "_multiply", wrong)
    session, batch = opened("brgemm", "fp32")
    (check,) = check_steps(TorchBackend(), JaxBackend(), session.config, [batch])
    assert check.verdict == "disagreed" and check.origin is not None
    assert (check.origin.stage, check.origin.phase) == (stage, phase)


@pytest.mark.parametrize(("policy", "linears"), [("fp32", 14), ("bf16", 0)])
def test_every_fp32_product_is_by_onednn(policy, linears, monkeypatch):
    """Three products a linear and two micro-batches; of the head, three a chunk of 50 tokens or, under bf16, two."""
    seen, real = [], precision.by_onednn
    monkeypatch.setattr(precision, "by_onednn", lambda left, right: seen.append(left.shape) or real(left, right))
    gradients("onednn", policy)
    chunks = -(-2 * 32 // 50)
    assert len(seen) == 2 * (3 * linears + chunks * (3 if policy == "fp32" else 2))
    seen.clear()
    gradients("blas", policy)
    assert not seen


@pytest.mark.parametrize(
    ("vendor", "avx512", "policy", "compiled", "onednn"),
    [
        ("AuthenticAMD", True, "fp32", 0, 1),
        ("AuthenticAMD", True, "tf32", 0, 1),
        ("AuthenticAMD", True, "bf16", 0, 0),
        ("AuthenticAMD", True, "fp32", 1, 1),
        ("AuthenticAMD", False, "fp32", 0, 0),
        ("GenuineIntel", True, "fp32", 0, 0),
        ("", False, "fp32", 0, 0),
    ],
)
@pytest.mark.parametrize("builds", [False, True], ids=["no compiler", "compiler"])
def test_auto(vendor, avx512, policy, compiled, onednn, builds, monkeypatch):
    """MKL keeps to AVX2 on x86 processors that are not Intel's; a run from before the rule goes on with oneDNN."""
    monkeypatch.setattr(auto, "vendor", lambda: vendor)
    monkeypatch.setattr(auto, "has_avx512", lambda: avx512)
    monkeypatch.setattr(auto, "has_cpp_compiler", lambda: builds)
    monkeypatch.setattr(auto, "builds_bf16_products", lambda: False)
    config = tiny_config(policy)
    config = config.model_copy(update={"compile": config.compile.model_copy(update={"enabled": bool(compiled)})})
    library = ("brgemm" if builds else "onednn") if onednn else "blas"
    assert settled(config, "cpu").precision.cpu_products == library
    assert (library_of(config, {}) == "onednn") is (policy != "bf16" and not compiled)
    assert library_of(settled(config, "cpu", {}), device="cuda") == "blas"
    told = precision.products_in_force(settled(config, "cpu"), torch.device("cpu"))
    assert ("FP32 products" in told) is bool(onednn)


def test_the_vendor_is_read():
    """On Linux an x86 processor has one; elsewhere there is none."""
    assert bool(auto.vendor()) == (sys.platform == "linux" and platform.machine() == "x86_64")


def test_shapes_and_strides():
    draw = torch.Generator().manual_seed(0)
    for m, k, n in [(5, 3, 7), (1, 64, 1), (33, 17, 128)]:
        left, right = torch.randn(k, m, generator=draw).T, torch.randn(k, n, generator=draw)
        exact = left.double() @ right.double()
        error = (precision.by_onednn(left, right).double() - exact).abs().max()
        assert error <= k * 2.0**-24 * (left.abs().double() @ right.abs().double()).max()


def test_a_torch_without_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(UserError, match="built without oneDNN; take 'blas'"):
        gradients("onednn", "fp32")
