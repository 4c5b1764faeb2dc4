"""An alarm runs the step again: what repeats, what does not, and the session is put back bit for bit."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lockstep.core.arrays import bit_equal
from lockstep.core.backend import NotSupported
from lockstep.core.errors import UserError
from lockstep.core.parity.diagnose.disagreement import repeated, sound
from lockstep.core.parity.evidence.capsule import read_capsule
from lockstep.core.parity.judge.judge import judge
from lockstep.core.parity.judge.update import flat
from lockstep.parity_tests.replay.made import CONFIG, VERSIONS, Flips, Gelu, HiddenMomentum, evidence_of, reference
from lockstep.parity_tests.tiny import text_batch
from lockstep.torch_backend.session import TorchSession

PLACE = {"candidate": "torch", "reference": "jax", "versions": VERSIONS}


def flagged(session: TorchSession):
    evidence = evidence_of(session)
    check = judge(evidence, reference())
    assert check.verdict == "disagreed"
    return evidence, check


def same(one, other) -> bool:
    a, b = flat(one), flat(other)
    return a.keys() == b.keys() and all(bit_equal(a[name], b[name]) for name in a)


OUTSIDE = (
    "as it ran, it depended on something outside the state that the session shows, which loading resets, or on "
    "hardware; run the same steps again: what recurs at the same step with the same bits is no hardware"
)


def test_a_corrupted_value_is_hardware_or_outside_the_state(tmp_path):
    Flips.struck = False
    session = Flips(CONFIG)
    evidence, check = flagged(session)
    session.step(text_batch(CONFIG, 1))  # training has gone on when the verdict comes
    before = session.state()
    alarm = sound(session, evidence, check, CONFIG, tmp_path, **PLACE)
    assert alarm.repeated is False
    assert "does not repeat from its state: run again twice, it gives the same bits twice" in alarm.summary
    assert OUTSIDE in alarm.summary
    assert "blocks.1.mlp.up_proj.weight" in alarm.differed[0]
    assert same(session.state(), before)
    assert session.steps_done == 2
    assert alarm.capsule is not None and read_capsule(alarm.capsule).step == 1


def test_no_cause_is_sought_for_what_does_not_repeat(tmp_path):
    Flips.struck = False
    session = Flips(CONFIG)
    evidence, check = flagged(session)

    def never(evidence, check):
        raise AssertionError("asked for the cause of an accident")

    assert sound(session, evidence, check, CONFIG, tmp_path, find_cause=never, **PLACE).repeated is False


def test_a_fault_of_the_program_repeats(tmp_path):
    session = Gelu(CONFIG)
    evidence, check = flagged(session)
    session.step(text_batch(CONFIG, 1))
    before = session.state()
    alarm = sound(session, evidence, check, CONFIG, tmp_path, find_cause=lambda e, c: "disappears on Sundays", **PLACE)
    assert (alarm.repeated, alarm.differed) == (True, ())
    assert alarm.cause[:2] == ("the same step, run again, gives the same bits", "disappears on Sundays")
    assert alarm.summary.startswith("step 1: act (forward, layer 0) at blocks.0.mlp.act; ")
    assert alarm.capsule is not None
    written = json.loads((alarm.capsule / "verdict.json").read_text())
    assert written["cause"] == "; ".join(alarm.cause)
    assert same(session.state(), before)
    # Training goes on as if nothing had been.
    other = Gelu(CONFIG)
    other.load(before)
    assert session.step(text_batch(CONFIG, 2)) == other.step(text_batch(CONFIG, 2))
    assert same(session.state(), other.state())


class _Restless(Gelu):
    """Wrong every time, and every time by another rounding, as sums by atomic addition are."""

    calls = 0

    def accumulate(self, batch):
        result = super().accumulate(batch)
        type(self).calls += 1
        self.parameters["embed.weight"].grad[0, 0] += 1e-9 * self.calls
        return result


def test_a_fault_whose_sums_vary_repeats_if_it_is_judged_again(tmp_path):
    session = _Restless(CONFIG)
    evidence, check = flagged(session)
    assert repeated(session, evidence, check, CONFIG).happened is False
    again = repeated(session, evidence, check, CONFIG, lambda second: judge(second, reference()))
    assert again.happened is True and "sums vary from run to run" in again.why


def test_what_is_other_in_each_repeat_is_called_random_numbers_or_a_race():
    session = _Restless(CONFIG)
    evidence, check = flagged(session)
    found = repeated(session, evidence, check, CONFIG)
    assert found.happened is False
    assert found.why.startswith("does not repeat: random numbers that no state holds, such as those of dropout")


def test_what_is_other_in_one_repeat_of_two_is_called_hardware_or_a_race(monkeypatch):
    session = Gelu(CONFIG)
    evidence, check = flagged(session)
    accumulate, calls = session.accumulate, []

    def first_repeat_flips(batch):
        result = accumulate(batch)
        if not calls:
            session.parameters["embed.weight"].grad[0, 0] += 1e-3
        calls.append(batch)
        return result

    monkeypatch.setattr(session, "accumulate", first_repeat_flips)
    found = repeated(session, evidence, check, CONFIG)
    assert found.happened is False and found.why.startswith("does not repeat: hardware or a race; ")


def test_momentum_that_the_state_does_not_hold_is_not_called_hardware_alone(tmp_path):
    session = HiddenMomentum(CONFIG)
    session.step(text_batch(CONFIG, 1))
    evidence, check = flagged(session)
    assert check.origin is not None and check.origin.stage == "moments"
    before = session.state()
    alarm = sound(session, evidence, check, CONFIG, tmp_path, **PLACE)
    assert alarm.repeated is False and OUTSIDE in alarm.summary
    assert "hardware or a race" not in alarm.summary
    assert same(session.state(), before)


class _CannotLoad(Gelu):
    def load(self, state):
        raise NotSupported("weights live elsewhere")


def test_a_session_that_cannot_load_is_said_to(tmp_path):
    session = Gelu(CONFIG)
    evidence, check = flagged(session)
    session.__class__ = _CannotLoad
    before = session.state()
    alarm = sound(session, evidence, check, CONFIG, tmp_path, **PLACE)
    assert alarm.repeated is None
    assert "could not be run again: weights live elsewhere" in alarm.summary
    assert alarm.capsule is not None and same(session.state(), before)


def test_a_state_that_does_not_come_back_is_not_trained_on(tmp_path):
    class Forgets(Gelu):
        def load(self, state):
            super().load(state)
            self.parameters["embed.weight"].data[0, 0] += 1 if state.step else 0

    session = Forgets(CONFIG)
    evidence, check = flagged(session)
    with pytest.raises(UserError, match=r"did not take its state back: params/embed\.weight differs"):
        repeated(session, evidence, check, CONFIG)


def test_no_room_for_the_capsule_is_part_of_the_alarm(tmp_path):
    session = Gelu(CONFIG)
    evidence, check = flagged(session)
    (tmp_path / "capsules").write_text("in the way")
    alarm = sound(session, evidence, check, CONFIG, tmp_path / "capsules", **PLACE)
    assert alarm.capsule is None and "no capsule: cannot write the capsule" in alarm.summary


def test_bits_are_compared_as_bits():
    nan = np.array([np.nan, 1.0], np.float32)
    assert bit_equal(nan, nan.copy())
    assert not bit_equal(np.zeros(2, np.float32), -np.zeros(2, np.float32))
    assert not bit_equal(np.zeros(2, np.float32), np.zeros(2))
