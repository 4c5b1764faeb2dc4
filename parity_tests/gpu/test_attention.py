"""Attention's kernels on CUDA: each is the formula within its format's rounding, alone and in a compiled step."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lockstep.core.config.schema import AttentionConfig
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.attention import Kernel, Machine, document_mask, refusal
from lockstep.torch_backend.backend import TorchBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NAMES = ["auto", "cudnn", "flash", "efficient", "math", "fa3", "flex"]
SHAPE = (2, 4, 256, 64)


def require(name: str, masked: bool, head_dim: int) -> AttentionConfig:
    attention = AttentionConfig(kernel=name, document_mask=masked)
    if why := refusal(attention, head_dim, torch.bfloat16, Machine.of(torch.device("cuda"))):
        pytest.skip(why)
    return attention


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_the_formula(name, masked):
    require(name, masked, SHAPE[-1])
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    documents = torch.arange(SHAPE[2], device="cuda").div(100, rounding_mode="floor").expand(SHAPE[0], -1)
    seen = document_mask(documents if masked else torch.zeros_like(documents))

    def by(call, *inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = call(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]

    kernel = Kernel(name)
    found = by(lambda q, k, v: kernel(q, k, v, kernel.mask(documents) if masked else None), q, k, v)
    due = by(
        lambda q, k, v: (q @ k.mT / math.sqrt(SHAPE[-1])).masked_fill(~seen, -torch.inf).softmax(-1) @ v,
        *(x.double() for x in (q, k, v)),
    )
    for one, truth in zip(found, due, strict=True):
        assert one.dtype == torch.bfloat16
        assert ((one.double() - truth).norm() / truth.norm()).item() < 2**-7


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_that_of_the_cpu(name, masked, compiled):
    """The gradients of a whole model in bf16, by direction and length."""
    config = tiny_config("bf16", compiled, hidden=256)
    attention = require(name, masked, config.model.head_dim)
    config = config.model_copy(update={"attention": attention})
    batch = uneven_weights(text_batch(config), 0)
    on_cuda = TorchBackend().open(config.model_copy(update={"device": "cuda"})).gradients(batch)
    plain = config.model_copy(update={"device": "cpu", "attention": attention.model_copy(update={"kernel": "auto"})})
    on_cpu = TorchBackend().open(plain).gradients(batch)
    for key, due in on_cpu.grads.items():
        assert np.linalg.norm(on_cuda.grads[key] - due) < 0.05 * np.linalg.norm(due), key


def test_evaluation_in_another_precision_than_the_kernel_s():
    attention = require("cudnn", False, 64)
    config = tiny_config("bf16", hidden=256).model_copy(update={"device": "cuda", "attention": attention})
    session = TorchBackend().open(config)
    low, full = (session.evaluate(text_batch(config), policy)["nll"] for policy in (None, "fp32"))
    np.testing.assert_allclose(low, full, rtol=2**-6)


def test_documents_do_not_see_each_other():
    attention = require("flex", True, 64)
    config = tiny_config("bf16", True, hidden=256).model_copy(update={"device": "cuda", "attention": attention})
    session = TorchBackend().open(config)
    batch = text_batch(config)
    half = batch.tokens.shape[1] // 2
    documents = np.repeat(np.arange(2, dtype=np.int32), half)[None].repeat(len(batch.tokens), 0)
    changed = batch.tokens.copy()
    changed[:, 0] ^= 1
    here, there = (
        session.evaluate(replace(batch, tokens=tokens, documents=documents))["nll"][:, half:]
        for tokens in (batch.tokens, changed)
    )
    assert np.array_equal(here, there)
