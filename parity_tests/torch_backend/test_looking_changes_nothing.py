"""An observation leaves a session as it was, bit for bit, and the next step too."""

from __future__ import annotations

import pytest

from lockstep.core.model.names import tap_names
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.evidence.probe import probe_batch
from lockstep.core.parity.evidence.taps import observed_names
from lockstep.parity_tests.cross.variants import same_bits
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend

CONFIG = tiny_config("bf16", train={"sequence_length": 32})
LOOKS = {
    "gradients": lambda s: s.gradients(text_batch(CONFIG, 7)),
    "observe": lambda s: s.observe(text_batch(CONFIG, 7), tap_names(CONFIG.model)),
    "observe all": lambda s: s.observe(text_batch(CONFIG, 7).micro_batches(2)[0], observed_names(CONFIG)),
    "sketch": lambda s: s.sketch(probe_batch(text_batch(CONFIG, 7).micro_batches(2)[0], 0)),
    "evaluate": lambda s: s.evaluate(text_batch(CONFIG, 7)),
    "evaluate in fp32": lambda s: s.evaluate(text_batch(CONFIG, 7), "fp32"),
    "next_token_logits": lambda s: s.next_token_logits(text_batch(CONFIG, 7).tokens[0]),
    "state": lambda s: s.state(),
}


def stepped(count=2):
    session = TorchBackend().open(CONFIG)
    for seed in range(count):
        session.step(text_batch(CONFIG, seed))
    return session


@pytest.fixture(scope="module")
def two_steps():
    return stepped(2).state()


@pytest.fixture(scope="module")
def three_steps():
    return stepped(3).state()


@pytest.mark.parametrize("look", LOOKS)
def test_the_state_stays(look, two_steps, three_steps):
    session = stepped()
    LOOKS[look](session)
    assert same_bits(session.state(), two_steps)
    session.step(text_batch(CONFIG, 2))
    assert same_bits(session.state(), three_steps)


def test_a_step_does_change_it(two_steps, three_steps):
    assert not same_bits(two_steps, three_steps)


@pytest.mark.parametrize("program", [False, True], ids=["eager", "aot_eager"])
def test_norms_change_no_weight(program):
    config = tiny_config("bf16", compiled=program, train={"sequence_length": 32})
    batch = uneven_weights(text_batch(config), 0)
    plain, asked = TorchBackend().open(config), TorchBackend().open(config)
    for _ in range(2):
        without, with_norms = plain.step(batch), asked.step(batch, norms=True)
    assert same_bits(plain.state(), asked.state())
    assert not without.metrics and {"grad_norm/matrices", "update_ratio/matrices"} <= set(with_norms.metrics)
    assert (without.loss, without.grad_norm) == (with_norms.loss, with_norms.grad_norm)


@pytest.mark.parametrize("program", [False, True], ids=["eager", "aot_eager"])
def test_checked_or_not_the_trained_weights_are_equal(program):
    """Every step checked as during training, and every other one sketched, against a run that is not observed."""
    config = tiny_config("bf16", compiled=program, train={"sequence_length": 32})
    checked, alone = TorchBackend().open(config), TorchBackend().open(config)
    for step in range(4):
        batch = text_batch(config, step)
        probe = probe_batch(batch.micro_batches(2)[0], step)
        if step % 2:
            checked.sketch(probe)
        gather(checked, config, batch, probe)
        alone.step(batch)
    assert same_bits(checked.state(), alone.state())
