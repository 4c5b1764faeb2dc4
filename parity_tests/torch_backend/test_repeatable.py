"""The same weights and batch give the same bits, every time, in every program.

Inductor turns the gradient of `F.embedding` into an atomic scatter-add, whose order changes from run to run where a
token occurs twice. The machine decides whether two threads really meet, so the generated code is read as well.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

import lockstep.torch_backend.model
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.parity_tests.torch_backend.programs import GENERATED, PROGRAMS, fresh_compiler, same_gradients, under
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.kernels.embedding import embedding

CONFIG = tiny_config("bf16", layers=1, train={"sequence_length": 64})
BATCH = uneven_weights(text_batch(CONFIG), 0)


@pytest.fixture(autouse=True)
def compiler():
    with fresh_compiler():
        yield


def test_tokens_repeat():
    """Else there would be nothing to race for."""
    assert np.unique(BATCH.tokens).size < BATCH.tokens.size / 4


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_repeat_bit_for_bit(program):
    session = TorchBackend().open(under(CONFIG, PROGRAMS[program]))
    first = session.gradients(BATCH)
    assert all(same_gradients(first, session.gradients(BATCH)) for _ in range(10))
    assert same_gradients(first, TorchBackend().open(session.config).gradients(BATCH))


def test_tracing_changes_no_bit():
    found = [TorchBackend().open(under(CONFIG, PROGRAMS[p])).gradients(BATCH) for p in ("eager", "aot_eager")]
    assert same_gradients(*found)


def test_one_token_is_seen():
    """The negative twin of the comparison."""
    session = TorchBackend().open(CONFIG)
    other = type(BATCH)(BATCH.tokens.copy(), BATCH.targets, BATCH.weights)
    other.tokens[0, -1] ^= 1
    assert not same_gradients(session.gradients(BATCH), session.gradients(other))


def inductors_operations(operator):
    """Return the names of the operations that Inductor receives for a look-up and its gradient, in one string."""

    def program(tokens, weight):
        return torch.autograd.grad(operator(tokens, weight).square().sum(), weight)

    weight = torch.randn(CONFIG.model.vocab_size, 8, requires_grad=True)
    traced = make_fx(program, select_decomp_table())(torch.from_numpy(BATCH.tokens), weight)
    return " ".join(str(node.target) for node in traced.graph.nodes)


def test_inductor_is_given_the_gradient_as_one_operation():
    """Inductor generates atomic additions for an accumulating index_put; the two tests below read its code."""
    ours, plain = inductors_operations(embedding), inductors_operations(F.embedding)
    assert "lockstep.embedding_gradient" in ours and "index_put" not in ours
    assert "index_put_accumulate" in plain


def generated_code() -> str:
    session = TorchBackend().open(under(CONFIG, GENERATED))
    _, code = run_and_get_code(session.gradients, BATCH)
    assert len(code) == 2, "forward and backward"
    return "\n".join(code)


def test_generated_code_adds_nothing_atomically():
    assert "atomic_add" not in generated_code()


def test_the_plain_embedding_would_be_added_atomically(monkeypatch):
    """The bug planted back: it is what the operator in torch_backend/kernels/embedding.py is for."""
    monkeypatch.setattr(lockstep.torch_backend.model, "embedding", F.embedding)
    assert "atomic_add" in generated_code()
