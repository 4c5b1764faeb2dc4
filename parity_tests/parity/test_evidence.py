"""What is gathered from a candidate, and the uneven loss weights of parity batches."""

from __future__ import annotations

import numpy as np
import pytest

from core.backend import Batch, NotSupported
from core.parity.evidence import TAPPED_SEQUENCES, gather, uneven_weights
from core.parity.judge import Reference, judge
from jax_backend.session import JaxBackend
from parity_tests.tiny import text_batch, tiny_config
from torch_backend.session import TorchBackend, TorchSession

CONFIG = tiny_config("fp32")


@pytest.fixture(scope="module")
def reference():
    return Reference.open(JaxBackend(), CONFIG)


def test_weights_are_uneven_between_micro_batches_and_between_tokens():
    ones = np.ones((8, 64), np.float32)
    tokens = np.zeros((8, 64), np.int32)
    weights = uneven_weights(Batch(tokens, tokens, ones), 7).weights
    assert set(np.unique(weights)) == {0.0, 0.5, 1.0}
    sums = weights.reshape(4, -1).sum(1)
    assert sums[0] > 1.5 * sums[-1]
    assert (weights.sum(1) > 0).all()
    assert np.array_equal(weights, uneven_weights(Batch(tokens, tokens, ones), 7).weights)
    assert not np.array_equal(weights, uneven_weights(Batch(tokens, tokens, ones), 8).weights)


def test_evidence_is_a_step_and_leaves_the_weights_that_a_plain_step_leaves():
    watched, plain = TorchBackend().open(CONFIG), TorchBackend().open(CONFIG)
    batch = text_batch(CONFIG)
    evidence = gather(watched, CONFIG, batch)
    record = plain.step(batch)
    assert evidence.record.loss == record.loss
    assert evidence.tapped.tokens.shape[0] == TAPPED_SEQUENCES
    for name, p in plain.state().params.items():
        assert np.array_equal(p, watched.state().params[name])


class _Blind(TorchSession):
    def observe(self, batch, taps):
        raise NotSupported("cannot look inside")


class _Silent(_Blind):
    def gradients(self, batch):
        raise NotSupported("no gradients")


def open_as(session):
    class Backend(TorchBackend):
        session_class = session

    return Backend().open(CONFIG)


def test_what_a_candidate_cannot_do_is_listed_and_the_rest_is_judged(reference):
    check = judge(gather(open_as(_Blind), CONFIG, text_batch(CONFIG)), reference)
    assert check.verdict == "agreed"
    assert any("cannot look inside" in item for item in check.not_covered)
    assert {"gradients", "update", "nll"} <= {f.stage for f in check.findings}


def test_a_candidate_that_shows_no_gradients_is_not_judged_on_them(reference):
    check = judge(gather(open_as(_Silent), CONFIG, text_batch(CONFIG)), reference)
    assert any("no gradients" in item for item in check.not_covered)
    assert not {"gradients", "update", "nll"} & {f.stage for f in check.findings}


def test_a_probe_is_judged_instead_of_the_batch(reference):
    batch = text_batch(CONFIG)
    probe = uneven_weights(batch.micro_batches(2)[0], 1)
    check = judge(gather(TorchBackend().open(CONFIG), CONFIG, batch, probe), reference)
    assert check.verdict == "agreed", check.origin
    assert next(f for f in check.findings if f.stage == "nll").size == probe.tokens.size
    assert "loss_of_step" in {f.tap for f in check.findings}


def test_a_name_that_is_missing_disagrees(reference):
    evidence = gather(TorchBackend().open(CONFIG), CONFIG, text_batch(CONFIG))
    assert evidence.probed is not None
    del evidence.probed.grads["final_norm.weight"]
    check = judge(evidence, reference)
    assert check.verdict == "disagreed"
    assert check.origin is not None
    assert (check.origin.stage, check.origin.note) == ("gradients", "final_norm.weight")
