"""The learning rate against its closed form at the points where it is plain."""

import math

import pytest

from core.config import OptimConfig
from core.schedule import learning_rate

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
