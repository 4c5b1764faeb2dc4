"""Recomputation gives the same bits under every policy, and keeps less."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep.core.config.schema import RecomputeConfig
from lockstep.core.model.names import GRADIENT
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.model import SwiGLU

PLANS = (
    {"parts": "embedding"},
    {"parts": "norms"},
    {"parts": "attention"},
    {"parts": "mlp"},
    {"parts": "norms,attention,mlp,embedding"},
    {"parts": "block"},
    {"parts": "block", "every": 2},
    {"parts": "block", "keep_products": True},
)


def session(plan, policy="bf16", compiled=False):
    torch._dynamo.reset()
    config = tiny_config(policy, compiled, train={"sequence_length": 32})
    return TorchBackend().open_rank(config.model_copy(update={"recompute": RecomputeConfig(**plan)}))


def batch(of):
    return uneven_weights(text_batch(of.config), 1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_same_bits(plan, compiled):
    plain, again = session({}, compiled=compiled), session(plan, compiled=compiled)
    one, other = plain.gradients(batch(plain)), again.gradients(batch(again))
    assert one.loss == other.loss
    assert all(np.array_equal(grad, other.grads[name]) for name, grad in one.grads.items())


@pytest.mark.parametrize("compiled", [False, True])
def test_taps_inside_what_is_recomputed_are_seen(compiled):
    names = ["blocks.1.mlp.act", GRADIENT + "blocks.1.mlp.act", GRADIENT + "blocks.0.attn.out"]
    plain, again = session({}, compiled=compiled), session({"parts": "block"}, compiled=compiled)
    one = plain.observe(batch(plain).micro_batches(2)[0], names)
    other = again.observe(batch(again).micro_batches(2)[0], names)
    assert set(one) == set(other) == set(names)
    assert all(np.array_equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("plan, calls", [({}, 2), ({"parts": "mlp"}, 4), ({"parts": "mlp", "every": 2}, 3)])
def test_it_is_computed_again(plan, calls, monkeypatch):
    """Two blocks: two calls, and one more for each that is recomputed; blocks count from 1."""
    seen = []
    right = SwiGLU.activate
    monkeypatch.setattr(SwiGLU, "activate", lambda self, g, u: seen.append(1) or right(self, g, u))
    of = session(plan)
    of.gradients(batch(of).micro_batches(2)[0])
    assert len(seen) == calls


@pytest.mark.parametrize("plan, share", [({"parts": "mlp"}, 0.85), ({"parts": "block"}, 0.6)])
def test_less_is_kept(plan, share):
    """Bytes that autograd saves for the backward pass, each storage counted once."""

    def kept(of):
        found = {}

        def pack(tensor):
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        micro = batch(of).micro_batches(2)[0]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            of._micro_loss(*of.to_device(micro), of.total_weight(micro))
        return sum(found.values()) - sum(p.untyped_storage().nbytes() for p in of.parameters.values())

    assert kept(session(plan)) < share * kept(session({}))


def test_blocks_are_one_program():
    """Compiled block by block: one graph serves them all, one more is the chunked head."""
    from torch._dynamo.utils import counters

    config = tiny_config("bf16", compiled=True, layers=3, train={"sequence_length": 32})
    torch._dynamo.reset()
    counters.clear()
    of = TorchBackend().open(
        config.model_copy(update={"compile": config.compile.model_copy(update={"scope": "blocks"})})
    )
    apart = of.gradients(text_batch(config))
    assert counters["stats"]["unique_graphs"] == 2
    whole = TorchBackend().open(config).gradients(text_batch(config))
    assert all(np.array_equal(grad, apart.grads[name]) for name, grad in whole.grads.items())
