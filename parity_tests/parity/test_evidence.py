"""Evidence is gathered from a candidate; parity batches have uneven loss weights."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.core.backend import Batch, NotSupported
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights, weighted_part, weighted_rows
from lockstep.core.parity.evidence.probe import probe_batch
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.session import TorchSession

CONFIG = tiny_config("bf16")


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
    assert evidence.weighted.tokens.shape[0] == 2
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
    assert "attn" not in {f.stage for f in check.findings}


def test_a_candidate_that_shows_no_gradients_is_not_judged_on_them(reference):
    check = judge(gather(open_as(_Silent), CONFIG, text_batch(CONFIG)), reference)
    assert any("no gradients" in item for item in check.not_covered)
    assert not {"gradients", "update", "nll"} & {f.stage for f in check.findings}


def test_a_probe_is_judged_instead_of_the_batch(reference):
    batch = text_batch(CONFIG)
    probe = probe_batch(batch.micro_batches(2)[0], 1)
    check = judge(gather(TorchBackend().open(CONFIG), CONFIG, batch, probe), reference)
    assert check.verdict == "agreed", check.origin
    nll = next(f for f in check.findings if (f.stage, f.scope) == ("nll", "end_to_end"))
    assert nll.size == probe.tokens.size
    assert "loss_of_step" in {f.tap for f in check.findings}
    assert any("does not load a state" in item for item in check.not_covered)


def test_a_probe_has_its_loss_on_the_first_and_the_last_sequence():
    micro = text_batch(tiny_config(train={"batch_size": 4, "micro_batch_size": 4}))
    probe = probe_batch(micro, 3)
    assert weighted_rows(probe).tolist() == [0, 3]
    assert np.array_equal(probe.tokens, micro.tokens) and not probe.weights[1:3].any()
    assert np.array_equal(weighted_part(probe).tokens, micro.tokens[[0, 3]])
    assert [weighted_rows(probe_batch(micro, 3, turn=turn)).tolist() for turn in range(3)] == [[0, 3], [1, 2], [0, 3]]
    odd = Batch(micro.tokens[:3], micro.targets[:3], micro.weights[:3])
    assert [weighted_rows(probe_batch(odd, 3, turn=turn)).tolist() for turn in range(2)] == [[0, 2], [0, 1]]
    alone = probe_batch(Batch(micro.tokens[:1], micro.targets[:1], micro.weights[:1]), 3)
    assert weighted_rows(alone).tolist() == [0]


def test_sequences_without_weight_contribute_nothing():
    """Why the reference may leave them out."""
    config = tiny_config("fp64", train={"batch_size": 4, "micro_batch_size": 4})
    probe = probe_batch(text_batch(config), 3)
    session = JaxBackend().open(config)
    whole, part = session.gradients(probe), session.gradients(weighted_part(probe))
    assert whole.loss == pytest.approx(part.loss, rel=1e-14)
    for name, grad in whole.grads.items():
        assert np.linalg.norm(grad - part.grads[name]) <= 1e-13 * np.linalg.norm(grad)


def test_a_name_that_is_missing_disagrees(reference):
    evidence = gather(TorchBackend().open(CONFIG), CONFIG, text_batch(CONFIG))
    assert evidence.probed is not None
    del evidence.probed.grads["final_norm.weight"]
    check = judge(evidence, reference)
    assert check.verdict == "disagreed"
    assert check.origin is not None
    assert (check.origin.stage, check.origin.tap) == ("gradients", "final_norm.weight")


def test_the_batch_that_the_data_order_prescribes_is_compared(reference):
    batch = text_batch(CONFIG)
    for due, verdict in ((batch.digest(), "agreed"), (text_batch(CONFIG, 1).digest(), "disagreed")):
        check = judge(gather(TorchBackend().open(CONFIG), CONFIG, batch, due=due), reference)
        assert check.verdict == verdict
    assert check.origin is not None and (check.origin.stage, check.origin.tap) == ("tokens", "order")
