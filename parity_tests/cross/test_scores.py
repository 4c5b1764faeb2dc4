"""`evaluate` makes no more logits at a time than a chunk's, whatever the head, in both backends."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from jax.extend.core import jaxprs_in_params
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.core.config.schema import LossConfig, RunConfig
from lockstep.core.train.loop import evaluated
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend import loss
from lockstep.torch_backend.backend import TorchBackend

VOCABULARY, CHUNK, TOKENS = 2000, 24, 4 * 64
HEADS = ["full", "chunked", "torch", "liger", "cce"]


def config_of(head: str, chunk: int = CHUNK, policy: str = "bf16") -> RunConfig:
    config = tiny_config(policy, vocab_size=VOCABULARY, hidden=16, ffn_hidden=32)
    return config.model_copy(update={"loss": LossConfig(head=head, chunk=chunk)})


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation makes."""

    found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.found = max(self.found, x.nbytes)
        return out


@pytest.mark.parametrize("policy", [None, "fp32"])
@pytest.mark.parametrize("head", HEADS)
def test_torch_widens_a_chunk_of_logits_at_a_time(head, policy, monkeypatch):
    # As on CUDA, where logits are not widened in pieces that fit a cache.
    monkeypatch.setattr(loss, "_is_whole", lambda logits: True)
    monkeypatch.setattr("lockstep.torch_backend.backend.check_head", lambda loss, device: None)
    config = config_of(head)
    session = TorchBackend().open(config)
    with Largest() as largest:
        session.evaluate(text_batch(config), policy)
    assert largest.found == 8 * CHUNK * VOCABULARY
    with Largest() as largest:
        session.next_token_logits(text_batch(config).tokens[0])
    assert largest.found <= 4 * VOCABULARY * config.model.hidden  # no more than the head's weight


def sizes(jaxpr) -> list[int]:
    """Bytes of every array that a traced program makes, in its inner programs as well."""
    found = []
    for equation in jaxpr.eqns:
        found += [x.aval.size * x.aval.dtype.itemsize for x in equation.outvars]
        for inner in jaxprs_in_params(equation.params):
            found += sizes(inner)
    return found


@pytest.mark.parametrize("head", HEADS)
def test_jax_makes_a_chunk_of_logits_at_a_time(head):
    config = config_of(head)
    session, batch = JaxBackend().open(config), text_batch(config)
    inputs = session.params, batch.tokens, batch.targets, None
    traced = jax.make_jaxpr(session.scores, static_argnums=4)(*inputs, session.policy)
    assert max(sizes(traced.jaxpr)) == 8 * CHUNK * VOCABULARY
    one = config.train.longest * VOCABULARY
    traced = jax.make_jaxpr(session.next_logits)(session.params, batch.tokens[:1], np.int32(3), None)
    assert max(sizes(traced.jaxpr)) < 4 * one


@pytest.mark.parametrize("backend", [TorchBackend, JaxBackend])
@pytest.mark.parametrize("chunk", [1, CHUNK, 100])
def test_chunks_change_the_order_of_no_sum_but_that_of_one_product(chunk, backend):
    """Each row of logits is a product of its own: in FP64 a chunk's differs by rounding alone, of D = 16 products."""
    whole, cut = (backend().open(config_of("full", n, "fp64")) for n in (TOKENS, chunk))
    batch = text_batch(whole.config)
    one, other = whole.evaluate(batch), cut.evaluate(batch)
    assert np.abs(one["nll"] - other["nll"]).max() < 1e-13
    assert np.array_equal(one["top1"], other["top1"])
    assert one["nll"].shape == other["nll"].shape == batch.targets.shape


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_the_fp32_slice_is_evaluated_a_micro_batch_at_a_time(micro):
    """Three sequences: the last micro-batch may be a part of one."""
    config = tiny_config("fp32", train={"micro_batch_size": micro})
    batch = text_batch(config).rows(slice(3))
    session, seen = TorchBackend().open(config), []
    whole = session.evaluate(batch)
    plain = session.evaluate
    session.evaluate = lambda part, policy=None: seen.append(len(part.tokens)) or plain(part, policy)
    found = evaluated(session, batch, config.train)
    assert seen == {1: [1, 1, 1], 2: [2, 1], 4: [3]}[micro]
    assert found["nll"].shape == whole["nll"].shape and np.array_equal(found["top1"], whole["top1"])
    np.testing.assert_allclose(found["nll"], whole["nll"], rtol=0, atol=64 * 2.0**-23)
