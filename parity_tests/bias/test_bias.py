"""Bias over checks: honest streams of 10,000 stay within the bounds, small biases leave them within 200."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest

from lockstep.core.errors import UserError
from lockstep.core.parity.evidence.sketch import K, sketch
from lockstep.core.parity.judge.bias import LEAST_CHECKS, SYSTEMATIC_MOST, Bias, limits

KEY = ("local", "blocks.0.attn.q")


def broken(bias, distance, gain, size=K, key=KEY):
    return {m.name for m in bias.measures(key, distance, gain, size) if not m.ok}


def stream(checks, size, d, rho=0.0, constant=0.0, gain=0.0, seed=0):
    """(apart, error, truth) with ‖apart‖ ≈ d·‖error‖: AR(1) between checks, plus a constant part and a length error.

    The constant part, of norm `constant`·‖error‖, is one random direction.
    """
    rng = np.random.default_rng(seed)
    fixed = rng.standard_normal(size)
    fixed /= np.linalg.norm(fixed)
    e = rng.standard_normal(size)
    for _ in range(checks):
        e = rho * e + math.sqrt(1 - rho**2) * rng.standard_normal(size)
        t = rng.standard_normal(size) * 100
        error = rng.standard_normal(size)
        error *= math.sqrt(size) / np.linalg.norm(error)
        yield d * e + math.sqrt(size) * (constant * fixed + gain * t / np.linalg.norm(t)), error, t


@pytest.mark.parametrize("rho", [0.0, 0.6])
@pytest.mark.parametrize("size", [16, K])
@pytest.mark.parametrize(("d", "distance"), [(0.006, 0.3), (0.4, 0.8), (1.2, 2.4)])
def test_10000_honest_checks_at_the_largest_clean_distance_raise_no_alarm(d, distance, size, rho):
    # Gain: what chance alone puts along t is of order d/√n; clean runs' extreme of it, doubled, is the bound.
    gain = 2 * max(0.05, 5 * d / math.sqrt(size))
    bias = Bias()
    for check, (apart, error, truth) in enumerate(stream(10_000, size, d, rho), 1):
        bias.add(KEY, apart, error, truth, np.float32)
        if check < 100 or check % 25 == 0:
            assert not broken(bias, distance, gain, size), f"after {check} checks"


def test_correlation_beyond_what_the_bound_tolerates_is_where_it_says():
    """ρ = 0.6 quadruples the variance, which MARGIN² covers; 0.95 is 39 times."""
    bias = Bias()
    alarms = 0
    for apart, error, truth in stream(2_000, K, 0.4, rho=0.95):
        bias.add(KEY, apart, error, truth, np.float32)
        alarms += bool(broken(bias, 0.8, 0.3))
    assert alarms


def test_what_libraries_differ_by_systematically_is_no_alarm_and_four_times_that_is():
    found = {}
    for constant in (0.05, 0.2):
        bias = Bias()
        for apart, error, truth in stream(10_000, 64, 0.4, constant=constant):
            bias.add(KEY, apart, error, truth, np.float32)
        found[constant] = broken(bias, 0.8, 0.5, 64)
    assert found == {0.05: set(), 0.2: {"bias", "bias_recent"}}


def nearest(x):
    """FP64 → bf16, to nearest even, as FP64."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def truncated(x):
    return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def product(rng, weight):
    """Return a matmul of positive numbers, as attention's weights are, its twin rounded to bf16."""
    t = np.abs(rng.standard_normal((32, 64))) @ weight
    return nearest(t), t


def truncates(rng, weight, step):
    w, t = product(rng, weight)
    return truncated(t), w, t


def one_column_truncates(rng, weight, step):
    w, t = product(rng, weight)
    c = w.copy()
    c[:, 5] = truncated(t[:, 5])
    return c, w, t


def rounds_up_by_a_quarter(rng, weight, step):
    t = rng.standard_normal((32, 64)) @ (weight - weight.mean())  # of both signs: lengths stay
    w = nearest(t)
    return w + 0.25 * np.sqrt(np.mean((w - t) ** 2)), w, t


def update(rng, share):
    """FP32 weights moved by an update of random direction, of which `share` times its rounding error is swallowed."""
    p = (0.02 * rng.standard_normal(8192)).astype(np.float32)
    moved = 1e-5 * rng.standard_normal(8192)
    w = (p + moved.astype(np.float32)).astype(np.float64) - p
    rounding = np.linalg.norm(w - moved) / np.linalg.norm(moved)
    # A library that adds in another order rounds a tenth of the elements otherwise.
    other = np.where(rng.random(8192) < 0.1, np.spacing(np.abs(p)) * rng.choice([-1, 1], 8192), 0.0)
    return w + 0.3 * other - share * rounding * moved, w, moved


def swallows_a_part_of_the_update(rng, weight, step):
    return update(rng, 0.36)


def honest_product(rng, weight, step):
    w, t = product(rng, weight)
    c = w.copy()
    flips = rng.integers(0, c.size, 2)  # a few elements that lie on a tie round the other way
    c.flat[flips] += np.spacing(np.abs(c.flat[flips]).astype(np.float32)) * 2**16 * rng.choice([-1, 1], 2)
    return c, w, t


def honest_update(rng, weight, step):
    return update(rng, 0.0)


# Bounds (D, G): the least of calibrated_bounds, and those of the update (clean runs reached 0.4 and 0.2).
ROUNDING, UPDATE = (0.3, 0.1), (0.8, 0.4)
FAULTS = {
    # fault, bounds, whether one step shows it, the latest step at which the sums must
    truncates: (ROUNDING, True, LEAST_CHECKS),
    one_column_truncates: (ROUNDING, False, 50),
    rounds_up_by_a_quarter: (ROUNDING, False, 50),
    swallows_a_part_of_the_update: (UPDATE, False, 200),
}


def watch(fault, bounds, steps):
    """(step at which a single check breaks a bound, step at which a sum does, by which measures)."""
    rng = np.random.default_rng(3)
    weight = np.abs(rng.standard_normal((64, 96)))
    bias, single = Bias(), None
    for step in range(1, steps + 1):
        c, w, t = fault(rng, weight, step)
        e = np.linalg.norm(w - t)
        gain = float(((c - w) * t).sum() / (t * t).sum())
        if single is None and (np.linalg.norm(c - w) / e > bounds[0] or abs(gain) * np.linalg.norm(t) / e > bounds[1]):
            single = step
        bias.add(KEY, sketch(c - w), sketch(w - t), sketch(t), np.float32)
        if found := broken(bias, *bounds):
            return single, step, found
    return single, None, set()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_biased_fault_is_found_within_200_steps_though_no_single_step_shows_it(fault):
    bounds, alone, latest = FAULTS[fault]
    single, step, found = watch(fault, bounds, 200)
    print(f"{fault.__name__}: single step {single}, sums at step {step} by {sorted(found)}")
    assert (single is not None) is alone
    assert step is not None and step <= latest


@pytest.mark.parametrize("honest", [honest_product, honest_update], ids=lambda f: f.__name__)
def test_the_same_without_the_fault_is_quiet(honest):
    assert watch(honest, UPDATE if honest is honest_update else ROUNDING, 400) == (None, None, set())


def test_a_length_error_in_ever_new_directions_is_found_by_the_gain_alone():
    _, step, found = watch(swallows_a_part_of_the_update, UPDATE, 200)
    assert found and all(name.startswith("gain_bias") for name in found) and step > LEAST_CHECKS


def test_a_bias_that_begins_late_is_found_by_the_sum_that_forgets():
    bias = Bias()
    for apart, error, truth in stream(3_000, 256, 0.4):
        bias.add(KEY, apart, error, truth, np.float32)
    assert not broken(bias, 0.8, 0.6, 256)
    for apart, error, truth in stream(200, 256, 0.4, constant=0.25, seed=1):
        bias.add(KEY, apart, error, truth, np.float32)
        if found := broken(bias, 0.8, 0.6, 256):
            break
    print(f"begun at 3,000, found {bias.checks(KEY) - 3_000} checks later by {sorted(found)}")
    assert found == {"bias_recent"}


def test_equal_scales_give_the_ratio_of_sums():
    """With one h, B is ‖Σe‖/√Σh² and U is |mean gain difference| / (h/‖t‖)."""
    rng = np.random.default_rng(0)
    e, t = rng.standard_normal((7, 50)), rng.standard_normal((7, 50)) * 10
    w = rng.standard_normal((7, 50))
    w /= np.linalg.norm(w, axis=1, keepdims=True)
    bias = Bias()
    for row in zip(e, w, t, strict=True):
        bias.add(KEY, *row, np.float32)
    gains = (e * t).sum(1) / (t * t).sum(1) * np.linalg.norm(t, axis=1)
    found = {m.name: m.value for m in bias.measures(KEY, 1.0, 1.0)}
    assert found["bias"] == pytest.approx(np.linalg.norm(e.sum(0)) / np.sqrt((w**2).sum()))
    assert found["gain_bias"] == pytest.approx(abs(gains.mean()))


def test_each_check_counts_once_however_large_its_gradients_are():
    bias = Bias()
    for check, (apart, error, truth) in enumerate(stream(200, 256, 0.1, constant=0.25)):
        scale = 1e4 if check < 10 else 1.0
        bias.add(KEY, apart * scale * (check >= 10), error * scale, truth * scale, np.float32)
    assert "bias" in broken(bias, 0.5, 0.5, 256)


def test_bounds_fall_with_the_checks_to_what_is_systematic():
    for distance, gain in ((0.3, 0.1), (0.8, 0.4), (10.0, 3.0)):
        most, most_gain = zip(*(limits(10.0**k, distance, gain) for k in range(8)), strict=True)
        least = [m / 10 ** (k / 2) for k, m in enumerate(most)]
        assert least == sorted(least, reverse=True) and list(most_gain) == sorted(most_gain, reverse=True)
        assert least[-1] == pytest.approx(min(distance / 8, SYSTEMATIC_MOST), rel=0.05)
        assert most_gain[0] == gain and most_gain[-1] == pytest.approx(gain / 2, rel=0.01)


def test_too_few_checks_say_nothing():
    bias = Bias()
    assert bias.measures(KEY, 1.0, 1.0) == () and bias.checks(KEY) == 0
    for check, (apart, error, truth) in enumerate(stream(LEAST_CHECKS, 32, 0.4), 1):
        bias.add(KEY, apart, error, truth, np.float32)
        assert bool(bias.measures(KEY, 0.8, 0.5)) is (check == LEAST_CHECKS)


def test_the_twins_error_is_floored_and_an_exact_stage_has_no_bias():
    """Twenty ulp of a table look-up, always the same way, is a bias; a hundredth of an ulp is below the floor."""
    t, zero = np.linspace(1, 2, 64), np.zeros(64)
    for key, apart in {("exact",): zero, ("below",): t * 1e-9, ("above",): t * 20 * 2.0**-23}.items():
        bias = Bias()
        for _ in range(50):
            assert bias.add(key, apart, zero, t, np.float32)
        assert bool(broken(bias, 0.3, 0.1, key=key)) is (key == ("above",))
    nothing = Bias()  # the gradient of an unused row: everything is zero
    for _ in range(9):
        nothing.add(KEY, zero, zero, zero, np.float32)
    assert not broken(nothing, 0.3, 0.1)


def test_what_is_not_finite_is_refused_and_leaves_the_sums_alone():
    bias = Bias()
    good = np.ones(8)
    for where in range(3):
        arrays = [good] * 3
        arrays[where] = np.array([np.nan] + [1.0] * 7)
        assert bias.add(KEY, *arrays, np.float32) is False
    assert not bias.add(KEY, good, good, good, np.float32, gain_difference=math.inf)
    assert bias.keys == () and bias.add(KEY, good, good, good, np.float32) and bias.keys == (KEY,)


@pytest.mark.parametrize("lengths", [(8, 8, 7), (8, 7, 8), (9, 9, 9), (0, 0, 0)])
def test_lengths_that_differ_are_an_error(lengths):
    bias = Bias()
    bias.add(KEY, *[np.ones(8)] * 3, np.float32)
    with pytest.raises(ValueError, match="length"):
        bias.add(KEY, *(np.ones(n) for n in lengths), np.float32)


def saved(bias):
    file = io.BytesIO()
    np.savez(file, **bias.to_arrays())
    file.seek(0)
    return Bias.from_arrays(np.load(file))


def test_sums_survive_a_resume_bit_for_bit():
    straight, resumed = Bias(), Bias()
    for check in range(300):
        if check == 150:
            resumed = saved(resumed)
        for key, size in ((KEY, K), (("end_to_end", "µ"), 5)):
            ((apart, error, truth),) = stream(1, size, 0.4, seed=check)
            for bias in (straight, resumed):
                bias.add(key, apart, error, truth, np.float32)
    ours, theirs = straight.to_arrays(), resumed.to_arrays()
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[k], theirs[k]) for k in ours)
    assert resumed.keys == (KEY, ("end_to_end", "µ"))
    assert saved(Bias()).keys == ()


def test_sums_of_another_version_or_in_part_are_refused():
    bias = Bias()
    bias.add(KEY, *[np.ones(8)] * 3, np.float32)
    whole = bias.to_arrays()
    for wrong in (
        whole | {"version": np.asarray(99)},
        {k: v for k, v in whole.items() if k != "totals"},
        whole | {"checks": np.zeros(0, np.int64)},
    ):
        with pytest.raises(UserError, match="bias sums"):
            Bias.from_arrays(wrong)


def test_the_curve_is_thinned_by_octave():
    bias = Bias()
    for apart, error, truth in stream(2_000, 4, 0.4):
        bias.add(KEY, apart, error, truth, np.float32)
    curve = bias.curve(KEY)
    assert curve.shape[1] == 5 and len(curve) < 128 * 5
    assert np.array_equal(curve[:128, 0], np.arange(1, 129)) and curve[-1, 0] == 2_000
    values = [m.value for m in bias.measures(KEY, 1.0, 1.0)]
    assert curve[-1, 1:].tolist() == values
