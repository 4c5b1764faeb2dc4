"""A candidate that shows NLL and gradients alone is held to means over all of them, and over checks."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from lockstep.core.backend import State
from lockstep.core.config.schema import OptimConfig
from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.gather import gather
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.judge.aggregates import LEAST_CHECKS, Means, geometric_mean
from lockstep.core.parity.judge.judge import Reference, judge
from lockstep.core.parity.judge.over_steps import OverSteps
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
    # Gradients of the micro-batch with uneven weights, and of the step with its own.
    assert len(means) == 2 and not all(mean.ok for mean in means)
    assert {f.scope for f in found.findings if not f.ok} == {"end_to_end"}
    assert "mean over layers of attn.q_proj.weight" in {f.tap for f in found.findings if not f.ok}


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


def begun(monkeypatch, checks: int, shift: float = 0.0) -> OverSteps:
    """Return sums over checks whose excesses are all `shift` off."""
    row = Extremes(0.1, 0.1, 0.1, 300, over_checks=0.02)
    monkeypatch.setattr(calibrated_bounds, "table", lambda: {"bf16/eager": {"gradients/together": row}})
    sums = OverSteps("bf16/eager")
    for number in range(1, checks + 1):
        sums.means.add(seen(float(np.exp(shift))), "gradients/together", 1000)
        sums.last_step = 10 * number
        list(sums.findings())
    return sums


def test_means_go_on_after_a_resume(monkeypatch):
    sums = begun(monkeypatch, LEAST_CHECKS - 1)
    again = OverSteps.resumed("bf16/eager", sums.to_arrays(), sums.last_step + 1)
    assert again is not None and not list(again.findings())
    again.means.add(seen(1.3), "gradients/together", 1000)
    (over,) = again.findings()
    assert f"over {LEAST_CHECKS} checks" in over.measures[0].basis
    assert over.measures[0].value == pytest.approx(1.3 ** (1 / LEAST_CHECKS))
    both = OverSteps.resumed("bf16/eager", again.to_arrays(), 1000)
    assert both is not None and both.to_arrays().keys() == again.to_arrays().keys()
    assert all(np.array_equal(value, again.to_arrays()[name]) for name, value in both.to_arrays().items())


def test_sums_of_another_recipe_of_steps_made_again_or_out_of_bounds_begin_anew(monkeypatch):
    sums = begun(monkeypatch, LEAST_CHECKS)
    assert OverSteps.resumed("bf16/eager", sums.to_arrays(), sums.last_step + 1) is not None
    assert OverSteps.resumed("bf16/compiled", sums.to_arrays(), sums.last_step + 1) is None
    assert OverSteps.resumed("bf16/eager", sums.to_arrays(), sums.last_step) is None
    wrong = begun(monkeypatch, LEAST_CHECKS, shift=0.3)
    assert wrong.accused and OverSteps.resumed("bf16/eager", wrong.to_arrays(), wrong.last_step + 1) is None


@pytest.mark.parametrize("name", ["recipe", "mean_kinds", "mean_checks", "mean_logarithms", "keys"])
def test_sums_that_are_not_whole_are_refused(name, monkeypatch):
    arrays = begun(monkeypatch, LEAST_CHECKS).to_arrays()
    for broken in ({k: v for k, v in arrays.items() if k != name}, arrays | {name: np.asarray(["x"] * 7)}):
        if name == "recipe" and "recipe" in broken:
            continue
        with pytest.raises(UserError, match="incomplete"):
            OverSteps.resumed("bf16/eager", broken, 1000)


def test_a_key_of_another_length_begins_anew():
    sums, rng = OverSteps("bf16/eager"), np.random.default_rng(0)
    for length, checks in ((64, 1), (64, 2), (32, 1)):
        arrays = tuple(rng.standard_normal((3, length)))
        sums.add(seen(1.0), "gradients/together", length, arrays, np.float32, 0.0)
        assert sums.bias.checks(sums.bias.keys[0]) == checks


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
