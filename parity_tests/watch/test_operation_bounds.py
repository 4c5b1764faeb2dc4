"""Bounds on one operation's result: honest roundings hold, and errors of each shape are seen."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.core.parity.watch.operation_bounds import Sides, exact, measured, unequal
from lockstep.core.parity.watch.update_rules import to_bfloat16

SHAPES = [(1,), (7,), (400, 1), (64, 33), (5, 7, 129), (1, 4096)]


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return (to_bfloat16(x) if dtype == "bfloat16" else x.astype(np.float32)).astype(np.float64)


def sides(t: np.ndarray, c: np.ndarray, dtype: str, twin: bool = True) -> Sides:
    return Sides(c, [t], [rounded(t, dtype)] if twin else [], dtype, 1.0)


def broken(found: Sides) -> set[str]:
    return {m.name for m in measured(found) if not m.ok}


@pytest.mark.parametrize("twin", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_honest_roundings_hold(shape: tuple[int, ...], dtype: str, twin: bool) -> None:
    """Three roundings at places of their own before the last; a thousand draws of small ones."""
    random = np.random.default_rng(0)
    for _ in range(1000 if np.prod(shape) < 1000 else 20):
        t = random.standard_normal(shape)
        c = t
        for scale in random.uniform(1, 2, (3, *shape)):
            c = rounded(c * scale, dtype) / scale
        assert not broken(sides(t, rounded(c, dtype), dtype, twin))


def wrong_everywhere(t: np.ndarray) -> np.ndarray:
    return t + 0.05 * np.random.default_rng(1).standard_normal(t.shape)


def wrong_row(t: np.ndarray) -> np.ndarray:
    found = t.copy()
    found[3] *= 1.1
    return found


def wrong_column(t: np.ndarray) -> np.ndarray:
    found = t.copy()
    found[:, 3] = 0
    return found


@pytest.mark.parametrize("twin", [True, False])
@pytest.mark.parametrize(
    ("spoil", "measure"),
    [(wrong_everywhere, "excess"), (wrong_row, "row"), (wrong_column, "column"), (lambda t: 1.003 * t, "gain")],
    ids=["everywhere", "row", "column", "length"],
)
def test_an_error_is_seen(spoil: object, measure: str, twin: bool) -> None:
    t = np.random.default_rng(0).standard_normal((400, 300))
    c = rounded(spoil(t), "bfloat16")  # type: ignore[operator]
    assert measure in broken(sides(t, c, "bfloat16", twin))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_seen(bad: float) -> None:
    t = np.random.default_rng(0).standard_normal((5, 6))
    c = t.astype(np.float32).astype(np.float64)
    c[1, 2] = bad
    assert broken(sides(t, c, "float32")) == {"not_finite"}


def test_infinities_of_a_mask_are_no_fault_and_a_wrong_sign_is() -> None:
    t = np.random.default_rng(0).standard_normal((5, 6))
    t[0, 1] = -np.inf
    c = t.astype(np.float32).astype(np.float64)
    assert not broken(sides(t, c, "float32"))
    c[0, 1] = np.inf
    assert broken(sides(t, c, "float32")) == {"not_finite"}


def test_zeros_take_no_rounding() -> None:
    """A masked softmax is zero: a number of bf16's last place at 1 in its place is an error."""
    t = np.zeros((40, 30))
    t[:, 0] = 1.0
    c = t.copy()
    assert not broken(sides(t, c, "bfloat16"))
    c[:, 1] = 2.0**-8
    assert broken(sides(t, c, "bfloat16"))


def test_fp64_is_compared_relatively() -> None:
    t = np.random.default_rng(0).standard_normal((5, 6))
    assert not broken(sides(t, t * (1 + 1e-14), "float64")) and broken(sides(t, t * (1 + 1e-10), "float64"))


def test_terms_that_cancel_are_honest_once_the_response_is_known() -> None:
    """A sum of large numbers that is small: the draws beside it tell how large its roundings are."""
    random = np.random.default_rng(0)
    x = random.standard_normal((1000, 3)) * 1e3
    x[-1] -= x.sum(0) - 1
    t, c = x.sum(0), np.array([1.0 + 3e-4, 1.0 - 2e-4, 1.0 + 1e-4])
    beside = [(x * (1 + 2.0**-10 * random.standard_normal(x.shape))).sum(0) for _ in range(4)]
    assert not all(m.ok for m in measured(Sides(c, [t], [], "float32", 1000.0)))
    assert all(m.ok for m in measured(Sides(c, [t, *beside], [], "float32", 1000.0)))
    assert not all(m.ok for m in measured(Sides(c + 1.0, [t, *beside], [], "float32", 1000.0)))


def test_a_fault_below_the_rounding_shows_in_the_bits() -> None:
    t = np.random.default_rng(0).standard_normal((100, 100))
    before = t.astype(np.float32).astype(np.float64)
    w = rounded(t, "bfloat16")
    assert unequal(w, w, before, t, "bfloat16").ok
    off = rounded(t * (1 + 1e-7), "bfloat16")
    assert unequal(off, w, before, t, "bfloat16").ok
    off = rounded(t + 2e-4, "bfloat16")
    assert not broken(sides(t, off, "bfloat16")) and not unequal(off, w, before, t, "bfloat16").ok


def test_what_is_moved_is_equal() -> None:
    x = np.array([1.0, np.nan, 3.0])
    assert exact(x, x.copy()).ok and not exact(x, np.array([1.0, np.nan, 3.0 + 1e-15])).ok
