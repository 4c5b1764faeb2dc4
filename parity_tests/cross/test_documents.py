"""Documents packed into one sequence are computed as if each stood alone, in both backends alike."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import lockstep.jax_backend.attention
import lockstep.jax_backend.model
import lockstep.torch_backend.attention
import lockstep.torch_backend.model
from lockstep.core.backend import Batch
from lockstep.core.config.schema import AttentionConfig
from lockstep.core.parity.evidence.loss_weights import uneven_weights, weighted_part
from lockstep.core.parity.evidence.probe import probe_batch
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.cross.variants import shaken_state
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend

LENGTH = 32
TRAIN = {"sequence_length": LENGTH, "batch_size": 4, "micro_batch_size": 2}
BACKENDS = {"torch": TorchBackend, "jax": JaxBackend}
SETTINGS = {
    "mask": AttentionConfig(document_mask=True),
    "positions": AttentionConfig(reset_positions=True),
    "both": AttentionConfig(document_mask=True, reset_positions=True),
}
# One token, several, and one that the window cuts.
LENGTHS = (1, 9, 5, 17)
DOCUMENTS = np.repeat(np.arange(len(LENGTHS)), LENGTHS).astype(np.int32)[None]


def config_of(settings, policy="fp64", compiled=False, **attention):
    config = tiny_config(policy, compiled, train=TRAIN)
    return config.model_copy(update={"attention": SETTINGS[settings].model_copy(update=attention)})


def opened(backend, config):
    session = BACKENDS[backend]().open(config)
    session.load(shaken_state(config.model))
    return session


def logits(session, tokens, documents):
    batch = Batch(tokens, tokens, np.ones(tokens.shape, np.float32), documents)
    return session.observe(batch, ["logits"])["logits"]


@pytest.mark.parametrize("settings", ["mask", "both"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_documents_are_those_apart(backend, settings):
    """Scores know distances alone: apart, where positions begin at 0, is the same with and without a reset."""
    session = opened(backend, config_of(settings))
    tokens = text_batch(session.config).tokens[:1]
    together = logits(session, tokens, DOCUMENTS)[0]
    ends = np.cumsum(LENGTHS)
    # Tokens after a document do not reach it.
    apart = np.stack(
        [np.resize(tokens[0, end - length : end], LENGTH) for length, end in zip(LENGTHS, ends, strict=True)]
    )
    each = logits(session, apart.astype(np.int32), np.zeros_like(apart, np.int32))
    due = np.concatenate([each[i, :length] for i, length in enumerate(LENGTHS)])
    np.testing.assert_allclose(together, due, rtol=0, atol=1e-12)
    as_one = logits(session, tokens, np.zeros_like(tokens))[0]
    assert np.abs(as_one[1:] - together[1:]).max(-1).min() > 1e-4


@pytest.mark.parametrize("settings", SETTINGS)
def test_gradients_agree(settings):
    config = config_of(settings)
    batch = uneven_weights(text_batch(config), 0)
    ours, theirs = (opened(name, config).gradients(batch) for name in BACKENDS)
    np.testing.assert_allclose(ours.nll, theirs.nll, rtol=1e-12)
    for name, grad in theirs.grads.items():
        assert np.abs(ours.grads[name] - grad).max() <= 1e-12 * np.abs(grad).max(), name


@pytest.mark.parametrize("settings", SETTINGS)
def test_compiled_is_eager(settings):
    config = config_of(settings, "fp32")
    batch = uneven_weights(text_batch(config), 0)
    eager, compiled = (
        TorchBackend().open(config_of(settings, "fp32", compiled=compiled)).gradients(batch)
        for compiled in (False, True)
    )
    for name, grad in eager.grads.items():
        assert np.abs(compiled.grads[name] - grad).max() <= 1e-5 * np.abs(grad).max(), name


def test_positions_alone_hide_nothing():
    """A token sees the documents before its own, at whatever position they stand."""
    session = opened("jax", config_of("positions"))
    tokens = text_batch(session.config).tokens[:1]
    other = tokens.copy()
    other[0, 0] ^= 1
    here, there = (logits(session, t, DOCUMENTS)[0] for t in (tokens, other))
    assert (np.abs(here - there).max(-1) > 1e-9).all()


@pytest.mark.parametrize("documents", [DOCUMENTS, np.zeros_like(DOCUMENTS), np.arange(LENGTH, dtype=np.int32)[None]])
def test_masks_and_positions_follow_from_the_documents(documents):
    seen = [[documents[0, i] == documents[0, j] and j <= i for j in range(LENGTH)] for i in range(LENGTH)]
    place = [list(documents[0, :i]).count(documents[0, i]) for i in range(LENGTH)]
    ours, theirs = torch.from_numpy(documents).long(), jnp.asarray(documents)
    for mask in (
        lockstep.torch_backend.attention.document_mask(ours),
        lockstep.jax_backend.attention.document_mask(theirs),
    ):
        assert np.array_equal(np.asarray(mask.tolist())[0, 0], seen)
    for positions in (lockstep.torch_backend.model.positions(ours), lockstep.jax_backend.model.positions(theirs)):
        assert np.array_equal(np.asarray(positions.tolist())[0], place)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_that_lost_its_documents_is_refused(backend):
    """To compute it as one document is the fault itself."""
    session = opened(backend, config_of("mask"))
    batch = replace(text_batch(session.config), documents=None)
    for ask in (session.step, session.gradients, session.evaluate, lambda b: session.observe(b, ["logits"])):
        with pytest.raises(ValueError, match="the batch has none"):
            ask(batch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_that_nobody_asks_for_change_nothing(backend):
    config = tiny_config("fp32", train=TRAIN)
    session = opened(backend, config)
    batch = text_batch(config)
    with_documents = replace(batch, documents=np.repeat(DOCUMENTS, len(batch.tokens), 0))
    assert np.array_equal(session.evaluate(batch)["nll"], session.evaluate(with_documents)["nll"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prompt_is_one_document(backend):
    session = opened(backend, config_of("both"))
    tokens = text_batch(session.config).tokens[:1]
    due = logits(session, tokens, np.zeros_like(tokens))[0, 6]
    np.testing.assert_allclose(session.next_token_logits(tokens[0, :7]), due, rtol=0, atol=1e-12)


def test_documents_go_with_their_sequences():
    config = config_of("mask")
    batch = text_batch(config)
    documents = np.repeat(np.arange(4, dtype=np.int32)[:, None], LENGTH, 1)
    batch = replace(batch, documents=documents)
    for i, part in enumerate(batch.micro_batches(2)):
        assert np.array_equal(part.documents, documents[2 * i : 2 * i + 2])
    assert np.array_equal(uneven_weights(batch, 0).documents, documents)
    probe = probe_batch(batch, 0, (1, 3))
    assert np.array_equal(probe.documents, documents)
    assert np.array_equal(weighted_part(probe).documents, documents[[1, 3]])


def test_the_digest_covers_documents_and_is_what_it_was_without():
    batch = text_batch(config_of("mask"))
    bare = replace(batch, documents=None)
    assert batch.digest() != bare.digest() == Batch(batch.tokens, batch.targets, batch.weights).digest()
    later = batch.documents.copy()
    later[0, -1] += 1
    assert replace(batch, documents=later).digest() != batch.digest()


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        (np.zeros((4, LENGTH), np.int64), "int32"),
        (np.zeros((4, LENGTH - 1), np.int32), "shape"),
        (np.repeat(DOCUMENTS[:, ::-1], 4, 0), "must not fall"),
    ],
)
def test_documents_that_are_none_are_refused(documents, said):
    batch = text_batch(tiny_config(train=TRAIN))
    with pytest.raises(ValueError, match=said):
        replace(batch, documents=documents)
