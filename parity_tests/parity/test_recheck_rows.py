"""Faults on sequences that a check does not examine by themselves: they are seen end to end, and then named."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lockstep.core.arrays import bit_equal
from lockstep.core.parity.diagnose.cause import find_cause
from lockstep.core.parity.diagnose.disagreement import repeated
from lockstep.core.parity.diagnose.recheck_rows import _of_small_gradients, recheck_rows
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import weighted_rows
from lockstep.core.parity.evidence.taps import look
from lockstep.core.parity.judge import local
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.judge.update import flat
from lockstep.core.parity.modes.side_by_side import check_steps
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults.own_step import MicroBatchesAfterTheThirdLost
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.model import Block, SwiGLU

CONFIG = tiny_config("bf16", train={"batch_size": 10, "micro_batch_size": 5})


def planted(change):
    """Plant `change` in the rows of the last block's SwiGLU."""

    class Wrong(SwiGLU):
        def activate(self, gate, up):
            return change(super().activate(gate, up))

    class Session(TorchBackend.session_class):
        def build_model(self):
            model = super().build_model()
            block = model.blocks[-1]
            assert isinstance(block, Block)
            block.mlp.__class__ = Wrong
            return model

    class Backend(TorchBackend):
        session_class = Session

    return Backend()


def forward_of(row, much=4.0):
    def change(act):
        act = act.clone()
        # Attention's logits are asked of two sequences alone.
        if row < len(act):
            act[row] = act[row] * much
        return act

    return change


def backward_of(row):
    def change(act):
        def halved(grad):
            grad = grad.clone()
            grad[row] = grad[row] / 2
            return grad

        act = act.clone()
        if act.requires_grad:
            act.register_hook(halved)
        return act

    return change


@pytest.mark.parametrize("row", [0, 1, 2, 3, 4])
@pytest.mark.parametrize(("phase", "change"), [("forward", forward_of), ("backward", backward_of)])
def test_a_fault_of_one_row_is_named(row, phase, change):
    (check,) = check_steps(planted(change(row)), TorchBackend(), CONFIG, [text_batch(CONFIG)])
    assert check.verdict == "disagreed"
    assert (check.origin.stage, check.origin.phase, check.origin.layer) == ("act", phase, 1)
    assert check.origin.scope == "local"
    if row not in (0, 4):
        assert f" {row}" in check.origin.note and "of the micro-batch" in check.origin.note


def flushed_below(limit):
    """Plant a gradient that goes through a format in which small numbers are zero."""

    def change(act):
        act = act.clone()
        if act.requires_grad:
            act.register_hook(lambda grad: torch.where(grad.abs() < limit, 0.0, grad))
        return act

    return change


SEVERAL = {"batch_size": 16, "micro_batch_size": 4}


@pytest.mark.parametrize(
    ("policy", "limit", "gradients"),
    [
        ("fp32", 2.0**-22, "as small as"),
        ("fp32", 2.0**-26, "as small as"),
        ("bf16", 2.0**-26, "as small as"),
        ("bf16", 2.0**-28, "64 times smaller than"),
    ],
)
def test_a_fault_of_small_gradients_is_named_with_small_gradients(policy, limit, gradients):
    """Those of two sequences are larger: at first a check finds only that the micro-batches do not add up."""
    config = tiny_config(policy, train=SEVERAL)
    session, reference = planted(flushed_below(limit)).open(config), Reference.open(JaxBackend(), config)
    evidence = gather(session, config, text_batch(config))
    check = judge(evidence, reference)
    assert check.origin.stage == "accumulation"
    _, check = recheck_rows(session, config, evidence, check, reference)
    assert (check.origin.stage, check.origin.phase, check.origin.layer) == ("act", "backward", 1)
    assert check.origin.note == f"with gradients {gradients} in the step"


@pytest.mark.parametrize("policy", ["bf16", "fp32"])
def test_a_sum_that_is_wrong_by_itself_keeps_its_name(policy):
    """Every stage of an honest model agrees with small gradients too."""
    config = tiny_config(policy, train=SEVERAL)
    session, reference = MicroBatchesAfterTheThirdLost().open(config), Reference.open(JaxBackend(), config)
    evidence = gather(session, config, text_batch(config))
    check = judge(evidence, reference)
    assert check.origin.stage == "accumulation"
    assert recheck_rows(session, config, evidence, check, reference) == (evidence, check)


def test_the_token_with_the_weight_is_not_compared():
    """Its noise is that of large gradients. Without it, all others are measured alike, however small they are."""
    config = tiny_config("bf16", train=SEVERAL)
    session, reference = TorchBackend().open(config), Reference.open(JaxBackend(), config)
    evidence = gather(session, config, text_batch(config))
    assert evidence.outweighs is None
    session.load(evidence.before)
    measured = []
    for tapped, _ in _of_small_gradients(evidence, config):
        seen = replace(evidence, tapped=tapped, taps=look(session, config, tapped, []))
        assert np.argwhere(seen.outweighs).tolist() == [[0, 0]]
        found = list(local.stages(seen, reference, []))
        assert {one.phase for one in found} == {"forward", "backward"} and all(one.ok for one in found)
        measured.append({(one.tap, m.name): m.value for one in found for m in one.measures if m.name == "excess"})
    first, *others = measured
    assert all(one == pytest.approx(first, rel=1e-3) for one in others)


def test_the_session_goes_on_where_it_was_and_the_alarm_repeats_the_same_rows():
    backend, batch = planted(forward_of(3)), text_batch(CONFIG)
    session, reference = backend.open(CONFIG), Reference.open(TorchBackend(), CONFIG)
    evidence = gather(session, CONFIG, batch)
    check = judge(evidence, reference)
    assert check.origin.scope == "end_to_end"
    seen, rechecked = recheck_rows(session, CONFIG, evidence, check, reference)
    assert 3 in weighted_rows(seen.tapped)
    now = flat(session.state())
    assert all(bit_equal(value, now[name]) for name, value in flat(evidence.after).items())
    assert repeated(session, seen, rechecked, CONFIG).happened
    cause = find_cause(backend, TorchBackend(), CONFIG, seen, rechecked)
    assert "present in every variation tried" in cause.words


@pytest.mark.parametrize("row", range(5))
def test_what_hides_end_to_end_is_found_when_its_row_has_its_turn(row):
    batches = [text_batch(CONFIG, seed) for seed in range(3)]
    checks = list(check_steps(planted(forward_of(row, 1.02)), TorchBackend(), CONFIG, batches))
    assert [check.verdict == "disagreed" for check in checks] == [row in (0, 4), row in (1, 3), row in (1, 2)]


def test_nothing_is_looked_for_where_the_origin_is_known():
    session, reference = TorchBackend().open(CONFIG), Reference.open(TorchBackend(), CONFIG)
    evidence = gather(session, CONFIG, text_batch(CONFIG))
    check = judge(evidence, reference)
    assert recheck_rows(session, CONFIG, evidence, check, reference) == (evidence, check)
