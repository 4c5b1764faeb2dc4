"""The fitted optimum: found where it is known, its interval covers as often as stated, and edges are named."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from lockstep.core.sweep.fit import Optimum, by_width, optimum, quantile
from lockstep.core.sweep.space import Point, Varied, read_space

KEY = "optim.peak_lr"
VARIED = read_space(["optim.peak-lr=1e-4:1e-1:log"])
BEST = 3e-3


def rows(rates, noise=0.0, seed=0, best=BEST):
    draw = np.random.default_rng(seed)
    return [({KEY: repr(float(r))}, 4 + 0.1 * math.log(r / best) ** 2 + noise * draw.standard_normal()) for r in rates]


def fit(of: Sequence[tuple[Point, float]], key: str, varied: Sequence[Varied]) -> Optimum:
    """Return the optimum of trials that have one."""
    found = optimum(of, key, varied)
    assert found is not None
    return found


RATES = np.geomspace(6e-4, 2e-2, 10)


def test_a_parabola_is_found_exactly() -> None:
    found = fit(rows(RATES), KEY, VARIED)
    assert found.rate == pytest.approx(BEST, rel=1e-6) and found.edge == "" and found.used == found.of == 10
    assert found.low == pytest.approx(BEST, rel=1e-4) and found.high == pytest.approx(BEST, rel=1e-4)


def test_trials_that_lie_on_a_parabola_have_an_interval_wherever_its_minimum_is() -> None:
    """The residuals are only rounding errors, and the interval has ends all the same."""
    for best in np.geomspace(1e-3, 1e-2, 100):
        found = fit(rows(RATES, best=best), KEY, VARIED)
        assert found.rate is not None and found.low is not None and found.high is not None
        assert found.low <= found.rate <= found.high and found.high / found.low < 1 + 1e-9


def test_the_interval_covers_as_often_as_it_says() -> None:
    """All rates within the factor take part in every draw, as the best trial is near the middle of few rates."""
    rates = np.geomspace(2e-3, 4.5e-3, 8)
    found = [fit(rows(rates, 0.002, seed), KEY, VARIED) for seed in range(400)]
    covered = [
        one.low is None or one.high is None or one.low <= BEST <= one.high for one in found if one.rate is not None
    ]
    assert len(covered) > 390 and 0.92 < sum(covered) / len(covered) < 0.98


def test_other_settings_are_added_and_not_taken_for_noise() -> None:
    varied = (*VARIED, *read_space(["optim.weight-decay=0,0.1", "optim.beta1=0.8:0.95"]))
    draw = np.random.default_rng(1)
    made = []
    for i, (point, loss) in enumerate(rows(RATES.repeat(2))):
        beta = draw.uniform(0.8, 0.95)
        more = {"optim.weight_decay": "0.1" if i % 2 else "0", "optim.beta1": repr(beta)}
        made.append(({**point, **more}, loss + 0.3 * (i % 2) + beta))
    assert fit(made, KEY, varied).rate == pytest.approx(BEST, rel=1e-6)
    alone = fit([({KEY: point[KEY]}, loss) for point, loss in made], KEY, VARIED)
    assert alone.low is None or alone.high is None or alone.high / alone.low > 1.5


def test_far_from_the_minimum_the_loss_is_no_parabola_and_is_left_out() -> None:
    diverged = [({KEY: "0.09"}, 50.0), ({KEY: "0.07"}, 40.0)]
    found = fit([*rows(RATES), *diverged], KEY, VARIED)
    assert found.used < found.of == 12 and found.rate == pytest.approx(BEST, rel=1e-6)


@pytest.mark.parametrize(("slope", "edge"), [(-0.1, "high"), (0.1, "low")])
def test_a_minimum_beyond_all_numbers_is_on_its_side_and_no_rate(slope: float, edge: str) -> None:
    """A loss that is hardly curved: its parabola ends at a rate of e^±50,000."""
    logs = [(rate, math.log(rate)) for rate in RATES]
    found = fit([({KEY: repr(float(rate))}, 5 + slope * x + 1e-6 * x * x) for rate, x in logs], KEY, VARIED)
    assert (found.rate, found.edge, found.low, found.high) == (None, edge, None, None)
    assert found.why == "the fitted minimum lies far outside the rates that were tried"


@pytest.mark.parametrize(("rates", "edge"), [(RATES[:5], "high"), (RATES[6:], "low")])
def test_an_optimum_at_the_edge_is_told(rates, edge) -> None:
    assert (
        fit(
            rows([*rates, *(rates * 1.01)]),
            KEY,
            VARIED,
        ).edge
        == edge
    )


def test_what_cannot_be_fitted_says_why() -> None:
    assert optimum([], KEY, VARIED) is None
    few = fit(rows(RATES[:4]), KEY, VARIED)
    assert few.rate is None and few.why == "a fit needs 5 trials at four rates or more, and there are 4 that ended"
    hill = fit([(point, -loss) for point, loss in rows(np.geomspace(2e-3, 4.5e-3, 8))], KEY, VARIED)
    assert hill.rate is None and "not curved upwards" in hill.why and hill.edge
    flat = fit(rows(np.geomspace(2e-3, 4.5e-3, 8), noise=1.0, seed=2), KEY, VARIED)
    assert flat.rate is None or flat.low is None


def test_quantiles_are_students() -> None:
    stats = pytest.importorskip("scipy.stats")
    for free in (1, 2, 3, 7, 15, 30, 31, 50, 200):
        assert quantile(free) == pytest.approx(stats.t.ppf(0.975, free), abs=6e-4)


def test_each_width_has_its_optimum_or_its_best_trial() -> None:
    fitted, alone = fit(rows(RATES), KEY, VARIED), fit(rows(RATES[:3]), KEY, VARIED)
    first, second = by_width({256: alone, 128: fitted})
    assert first[0] == 128 and first[1] == pytest.approx(BEST) and first[4]
    assert second[0] == 256 and second[1] == pytest.approx(RATES[2]) and second[2:] == (None, None, False)
