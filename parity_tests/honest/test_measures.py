"""Each measure finds a fault that no other finds; clean errors of any shape and many seeds break no bound."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lockstep.core.parity.honest.function import spacing
from lockstep.core.parity.honest.measures import Measured, Sides, measure
from lockstep.core.parity.watch.update_rules import to_bfloat16

DRAWS = 8
NOISE = 2.0**-8
# A kernel's error, from honest noise of its own, the truth and the draw's random numbers.
Error = Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]


def honest(noise: np.ndarray, truth: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return noise


def measured(error: Error, shape: tuple[int, ...], seed: int = 0) -> Measured:
    random = np.random.default_rng(seed)
    truth = [random.standard_normal(shape) for _ in range(DRAWS)]
    twin = [t + NOISE * np.asarray(random.standard_normal(shape)) for t in truth]
    candidate = [t + error(NOISE * np.asarray(random.standard_normal(shape)), t, random) for t in truth]
    return measure(Sides(candidate, twin, truth, "bfloat16", np.zeros(shape), 1.0), {}, "")


def broken(found: Measured) -> set[str]:
    return {m.name for m in found.measures if not m.ok}


def one_number(noise: np.ndarray, truth: np.ndarray, random: np.random.Generator) -> np.ndarray:
    noise[3, 5] += 20 * NOISE
    return noise


def one_row(noise: np.ndarray, truth: np.ndarray, random: np.random.Generator) -> np.ndarray:
    noise[3] *= 4
    return noise


def one_column(noise: np.ndarray, truth: np.ndarray, random: np.random.Generator) -> np.ndarray:
    noise[:, 3] *= 4
    return noise


def every_row_by_itself(noise: np.ndarray, truth: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return noise + NOISE * random.standard_normal((len(truth), 1)) * truth


def too_long(noise: np.ndarray, truth: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return noise + NOISE / 8 * truth


FAULTS: dict[str, tuple[Error, tuple[int, ...]]] = {
    "excess": (lambda noise, truth, random: 2.3 * noise, (300, 60)),
    "largest": (one_number, (300, 400)),
    "row": (one_row, (300, 60)),
    "column": (one_column, (300, 60)),
    "lengths": (every_row_by_itself, (300, 60)),
    "gain": (too_long, (20000,)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_measure_finds_what_no_other_does(name: str) -> None:
    error, shape = FAULTS[name]
    assert broken(measured(error, shape)) == {name}
    assert broken(measured(honest, shape)) == set()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (300,), (1, 50), (50, 1), (3, 4), (2, 3, 40), (120, 90)], ids=str)
def test_clean_errors_break_no_bound(shape: tuple[int, ...]) -> None:
    for seed in range(20):
        assert broken(measured(honest, shape, seed)) == set()


def test_four_roundings_for_one_are_allowed_and_sixteen_are_not() -> None:
    def rounding(times: int) -> Error:
        return lambda noise, truth, random: sum(
            (random.uniform(-0.5, 0.5, truth.shape) * spacing(truth, "bfloat16") for _ in range(times)), 0 * truth
        )

    def beside_one(times: int) -> set[str]:
        random = np.random.default_rng(0)
        truth = [random.standard_normal((200, 80)) for _ in range(DRAWS)]
        twin = [to_bfloat16(t) for t in truth]
        candidate = [t + rounding(times)(t, t, random) for t in truth]
        return broken(measure(Sides(candidate, twin, truth, "bfloat16", np.zeros((200, 80)), 1.0), {}, ""))

    assert beside_one(4) == set()
    assert "excess" in beside_one(16)


def test_an_exact_twin_allows_one_rounding_and_no_other_error() -> None:
    random = np.random.default_rng(0)
    truth = [random.standard_normal((30, 20)) for _ in range(DRAWS)]

    def beside_a_copy(candidate: list[np.ndarray]) -> set[str]:
        return broken(measure(Sides(candidate, truth, truth, "bfloat16", np.zeros((30, 20)), 1.0), {}, ""))

    assert beside_a_copy([to_bfloat16(t) for t in truth]) == set()
    assert {"excess", "gain", "lengths"} <= beside_a_copy([t * 1.02 for t in truth])


def test_a_long_sum_may_be_made_in_any_order() -> None:
    """FP32 sums of 4,096 terms one after another, beside sums by pairs: what the formula of `measures` is for."""
    random = np.random.default_rng(0)

    def beside_pairs(positive: bool, terms: float) -> set[str]:
        draws = [random.standard_normal((64, 4096)).astype(np.float32) for _ in range(DRAWS)]
        draws = [np.abs(x) if positive else x for x in draws]
        one_by_one = [np.cumsum(x, axis=1, dtype=np.float32)[:, -1].astype(np.float64) for x in draws]
        pairs = [x.sum(1, dtype=np.float32).astype(np.float64) for x in draws]
        truth = [x.sum(1, dtype=np.float64) for x in draws]
        response = np.square(draws[0].astype(np.float64)).sum(1)
        return broken(measure(Sides(one_by_one, pairs, truth, "float32", response, terms), {}, ""))

    for positive in (False, True):
        assert beside_pairs(positive, 4096.0) == set()
        assert "excess" in beside_pairs(positive, 1.0)
