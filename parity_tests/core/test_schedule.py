"""The learning rate against its closed form where that is plain, and what holds of every schedule at every step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lockstep.core.config.schema import OptimConfig, RunConfig, TrainConfig
from lockstep.core.train.schedule import batch_size, decay_steps, learning_rate, sequence_length

OPTIM = OptimConfig(peak_lr=2.0, min_lr_ratio=0.1, warmup_steps=10)
TOTAL = 110


@pytest.mark.parametrize(
    "step, expected",
    [
        (1, 2.0 / 10),
        (5, 1.0),
        (10, 2.0),
        (35, 2.0 * (0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)),  # a quarter of the cosine
        (60, 2.0 * 0.55),  # half of it
        (110, 0.2),
        (1000, 0.2),  # beyond the end it stays
    ],
)
def test_closed_form(step, expected):
    assert learning_rate(OPTIM, step, TOTAL) == pytest.approx(expected, rel=1e-14)


def test_one_step_off_is_seen():
    assert learning_rate(OPTIM, 6, TOTAL) != pytest.approx(1.0, rel=1e-3)
    assert learning_rate(OPTIM, 61, TOTAL) != pytest.approx(2.0 * 0.55, rel=1e-3)


def test_up_then_down_and_never_above_the_peak():
    lrs = [learning_rate(OPTIM, step, TOTAL) for step in range(1, TOTAL + 1)]
    assert lrs[:10] == sorted(lrs[:10]) and lrs[9:] == sorted(lrs[9:], reverse=True)
    assert max(lrs) == 2.0 and min(lrs) > 0


def test_without_warmup_the_first_step_is_on_the_cosine():
    optim = OptimConfig(peak_lr=1.0, min_lr_ratio=0.0, warmup_steps=0)
    assert learning_rate(optim, 1, 2) == pytest.approx(0.5)
    assert learning_rate(optim, 2, 2) == pytest.approx(0.0, abs=1e-16)


@pytest.mark.parametrize("step", [0, -1])
def test_steps_count_from_one(step):
    with pytest.raises(ValueError, match="count from 1"):
        learning_rate(OPTIM, step, TOTAL)


WSD = OptimConfig(peak_lr=2.0, min_lr_ratio=0.1, warmup_steps=10, schedule="wsd", decay_share=0.4)


@pytest.mark.parametrize(
    "changes, expected",
    [
        # Steps 5, 10, 11, 60, 61 of 100, a quarter and half of the decay, its last step.
        ({}, {5: 1.0, 10: 2.0, 11: 2.0, 60: 2.0, 61: 2 - 1.8 * math.sqrt(1 / 40), 70: 1.1, 100: 0.2, 999: 0.2}),
        ({"decay_shape": "linear"}, {5: 1.0, 60: 2.0, 61: 2 - 1.8 / 40, 70: 2 - 1.8 / 4, 80: 1.1, 100: 0.2, 999: 0.2}),
        ({"schedule": "linear"}, {5: 1.0, 10: 2.0, 11: 2 - 1.8 / 90, 55: 1.1, 100: 0.2, 999: 0.2}),
    ],
)
def test_closed_forms_of_wsd_and_linear(changes, expected):
    optim = WSD.model_copy(update=changes)
    assert {step: learning_rate(optim, step, 100) for step in expected} == pytest.approx(expected, rel=1e-14)


def test_the_stable_phase_is_the_peak_itself():
    optim = WSD.model_copy(update={"peak_lr": 3e-4, "min_lr_ratio": 0.85})  # 0.85 + (1 − 0.85) is not 1
    assert {learning_rate(optim, step, 100) for step in range(10, 61)} == {3e-4}


def test_a_decay_is_one_step_at_least():
    assert decay_steps(WSD.model_copy(update={"decay_share": 1e-9}), 100) == 1


@st.composite
def runs(draw):
    """Draw a schedule and a number of steps that go together."""
    steps = draw(st.integers(1, 3000))
    optim = {
        "schedule": draw(st.sampled_from(["cosine", "wsd", "linear"])),
        "peak_lr": draw(st.floats(1e-6, 1.0)),
        "min_lr_ratio": draw(st.floats(0, 1)),
        "warmup_steps": draw(st.integers(0, steps - 1)),
    }
    if optim["schedule"] == "wsd":
        optim["decay_share"] = draw(st.floats(1e-6, 1, allow_subnormal=False))
        optim["decay_shape"] = draw(st.sampled_from(["linear", "sqrt"]))
    try:
        return RunConfig(optim=OptimConfig(**optim), train=TrainConfig(steps=steps))
    except ValidationError:  # the decay would begin within the warm-up
        return RunConfig(optim=OptimConfig(**(optim | {"warmup_steps": 0})), train=TrainConfig(steps=steps))


# peak · W / W may be an ulp beside the peak.
ULP = 1 + 1e-15


@given(run=runs())
def test_every_schedule_rises_then_falls_from_above_zero_to_the_lowest_rate(run):
    optim, steps = run.optim, run.train.steps
    rates = [learning_rate(optim, step, steps) for step in range(1, steps + 1)]
    top = max(optim.warmup_steps - 1, 0)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert all(after <= before * ULP for before, after in zip(rates[top:], rates[top + 1 :], strict=False))
    assert max(rates) <= optim.peak_lr * ULP
    assert rates[-1] == pytest.approx(optim.peak_lr * optim.min_lr_ratio, rel=1e-12, abs=1e-18)
    assert steps == 1 or rates[0] > 0


@given(run=runs())
def test_no_schedule_jumps_at_a_seam(run):
    """From a seam to the step after it the rate falls by what one step of the piece that begins there allows."""
    optim, steps = run.optim, run.train.steps
    falling = decay_steps(optim, steps)
    root = optim.schedule == "wsd" and optim.decay_shape == "sqrt"
    # The largest changes: the first step of 1 − √x; the steepest of the cosine, π/2 times the mean; 1 of a single step.
    steepest = 1 / math.sqrt(falling) if root else min(math.pi / 2 / falling, 1.0)
    allowed = optim.peak_lr * steepest * (1 - optim.min_lr_ratio) + optim.peak_lr * 1e-12
    for seam in {optim.warmup_steps, steps - falling} - {0, steps}:
        before, after = (learning_rate(optim, step, steps) for step in (seam, seam + 1))
        assert before == pytest.approx(optim.peak_lr, rel=1e-15)
        assert 0 <= before * ULP - after <= allowed


TRAIN = TrainConfig(steps=20, batch_size=8, micro_batch_size=4, sequence_length=32, curriculum="16:0.25,32:.5, 64:0.25")


def test_each_step_has_the_length_of_its_share():
    assert [sequence_length(TRAIN, step) for step in range(1, 21)] == [16] * 5 + [32] * 10 + [64] * 5
    assert sequence_length(TRAIN, 1000) == 64
    assert (TRAIN.lengths, TRAIN.longest, TRAIN.accumulation) == ((16, 32, 64), 64, 2)


def test_tokens_of_a_step_and_of_a_micro_batch_stay():
    for step in range(1, 21):
        length = sequence_length(TRAIN, step)
        assert batch_size(TRAIN, step) * length == 8 * 32
        assert TRAIN.micro_batch_of(length) * length == 4 * 32
        assert batch_size(TRAIN, step) == TRAIN.accumulation * TRAIN.micro_batch_of(length)


@pytest.mark.parametrize("text", ["", " ", "\x1d", " , "])
def test_without_a_curriculum_there_is_one_length(text):
    train = TRAIN.model_copy(update={"curriculum": text})
    assert (train.lengths, train.longest) == ((32,), 32)
    assert [(sequence_length(train, s), batch_size(train, s)) for s in (1, 20)] == [(32, 8)] * 2
    assert train.micro_batch_of(32) == train.micro_batch_of(7) == 4


@given(shares=st.lists(st.integers(1, 30), min_size=1, max_size=5), steps=st.integers(1, 5000))
def test_shares_are_held_to_the_nearest_step_at_every_seam(shares, steps):
    total = sum(shares)
    # As decimals that add up to 1 exactly.
    cut = [round(10**6 * share / total) for share in shares]
    cut[-1] += 10**6 - sum(cut)
    lengths = [2**number for number in range(len(shares))]
    text = ", ".join(f"{length}:{share / 10**6:.6f}" for length, share in zip(lengths, cut, strict=True))
    train = TrainConfig(steps=steps, batch_size=64, micro_batch_size=64, sequence_length=1, curriculum=text)
    of_steps = [sequence_length(train, step) for step in range(1, steps + 1)]
    assert of_steps == sorted(of_steps)
    for number in range(1, len(lengths)):
        short = sum(length < lengths[number] for length in of_steps)
        assert abs(short - steps * sum(cut[:number]) / 10**6) <= 0.5 + 1e-9
