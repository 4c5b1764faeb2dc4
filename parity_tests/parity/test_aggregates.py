"""A candidate that shows NLL and gradients alone is held to means over all of them, and over checks."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from lockstep.core.backend import State
from lockstep.core.config.schema import OptimConfig
from lockstep.core.parity.evidence.gather import gather, uneven_weights
from lockstep.core.parity.judge.aggregates import LEAST_CHECKS, Means, geometric_mean
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.measures import calibrated_bounds
from lockstep.core.parity.measures.calibrated_bounds import Extremes
from lockstep.core.parity.measures.compare import finding
from lockstep.core.parity.measures.verdict import Check, Measure
from lockstep.jax_backend.backend import JaxBackend
from lockstep.parity_tests.faults.small import BlackBox, BlackBoxRopeAnglesInBf16
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend

TRAIN = {"sequence_length": 128, "steps": 1000, "micro_batch_size": 4}
OPTIM = OptimConfig(warmup_steps=5, peak_lr=3e-3, clip_norm=1.0)
CONFIG = tiny_config("bf16", train=TRAIN).model_copy(update={"optim": OPTIM})


@pytest.fixture(scope="module")
def trained() -> State:
    """Weights whose attention knows positions: at initial weights angles hardly matter."""
    with closing(TorchBackend().open(CONFIG)) as session:
        for step in range(100):
            session.step(text_batch(CONFIG, seed=step))
        return session.state()


@pytest.mark.usefixtures("in_one_process")
def test_rope_s_angles_in_bf16_are_found_in_a_black_box(trained):
    reference = Reference.open(JaxBackend(), CONFIG)

    def check(backend: TorchBackend) -> Check:
        session = backend.open(CONFIG)
        session.load(trained)
        return judge(gather(session, CONFIG, uneven_weights(text_batch(CONFIG, seed=1000), 0)), reference)

    assert check(BlackBox()).verdict == "agreed"
    found = check(BlackBoxRopeAnglesInBf16())
    assert found.verdict == "disagreed"
    means = [f for f in found.findings if f.tap == "geometric mean"]
    # Of the micro-batch with uneven weights, and of the step with its own.
    assert len(means) == 2 and not all(mean.ok for mean in means)
    assert {f.scope for f in found.findings if not f.ok} == {"end_to_end"}


def seen(excess: float):
    basis = "clean"
    return finding("gradients", "geometric mean", "end_to_end", (Measure("excess", excess, 0.5, 2.0, basis),), 20)


def test_a_small_excess_in_every_check_is_found_over_checks(monkeypatch):
    row = Extremes(0.1, 0.0, 0.0, 300, over_checks=0.02)
    monkeypatch.setattr(calibrated_bounds, "table", lambda: {"bf16/eager": {"gradients/together": row}})
    scattered = np.random.default_rng(0).normal(0.0, 0.1, 200)
    for shift, ok in ((0.0, True), (0.15, False), (-0.15, False)):
        means = Means("bf16/eager")
        for number, value in enumerate(scattered, 1):
            means.add(seen(float(np.exp(value + shift))), "gradients/together", 1000)
            assert bool(list(means.findings())) == (number >= LEAST_CHECKS)
        (over,) = means.findings()
        assert (over.scope, over.ok) == ("over_steps", ok)


def test_what_is_wrong_by_itself_or_was_not_measured_is_not_summed(monkeypatch):
    row = Extremes(0.1, 0.0, 0.0, 300)
    monkeypatch.setattr(calibrated_bounds, "table", lambda: {"bf16/eager": {"gradients/together": row}})
    means = Means("bf16/eager")
    for _ in range(LEAST_CHECKS):
        means.add(seen(1.0), "gradients/together", 1000)
    assert not list(means.findings())
    means.add(seen(3.0), "gradients/together", 1000)
    assert sum(len(mean.logarithms) for mean in means._means.values()) == LEAST_CHECKS


def test_the_geometric_mean_of_ratios():
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert geometric_mean([4.0, 1.0]) == pytest.approx(2.0)
