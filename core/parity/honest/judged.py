"""Judge an output or gradient: compare mine with plain and the truth, and with `torch.testing.assert_close`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.core.parity.honest.function import Value
from lockstep.core.parity.honest.measures import Measured, Sides, measure
from lockstep.core.parity.honest.sides import Side
from lockstep.core.parity.measures.decode import Direction, explain

__tracebackhide__ = True

# Relative and absolute tolerance of torch.testing.assert_close by dtype (torch/testing/_comparison.py).
DEFAULTS = {
    "bfloat16": (1.6e-2, 1e-5),
    "float16": (1e-3, 1e-5),
    "float32": (1.3e-6, 1e-5),
    "float64": (1e-7, 1e-7),
}
# Relative errors of the plain function. At the first, no digit is correct, and zeros would be as good. At the second,
# the truth itself is only the rounding error of FP64.
NO_DIGIT, NOTHING = 0.5, 1e6


@dataclass(frozen=True)
class Judged:
    """The verdict on an output or gradient.

    measured: the measures; None if nothing was measured.
    failures: faults that need no measure (missing, shape, not finite).
    untold: the reason why it cannot be judged, or empty.
    at: index, draw, and the numbers of mine, plain and truth where mine is worst.
    default: whether torch.testing.assert_close would accept it, and its result in words.
    """

    name: str
    size: int
    measured: Measured | None = None
    failures: tuple[str, ...] = ()
    untold: str = ""
    notes: tuple[str, ...] = ()
    at: tuple[tuple[int, ...], int, float, float, float] | None = None
    default: tuple[bool, str] | None = None

    @property
    def broken(self) -> tuple[str, ...]:
        """Names of the measures that fail, the furthest beyond its bound first."""
        if self.measured is None:
            return ()
        wrong = [m for m in self.measured.measures if not m.ok]
        return tuple(m.name for m in sorted(wrong, key=lambda m: -m.strain))

    @property
    def ok(self) -> bool:
        """Return whether it is as near to the truth as an honest kernel."""
        return not self.failures and not self.broken


def exact_one(name: str, sides: tuple[Side, Side, Side]) -> Judged:
    """Judge integers and booleans: mine may differ from the truth in at most as many places as plain does."""
    own, twin, exact = (np.array([one.array for one in side.of(name)]) for side in sides)
    wrong, of_plain = (int(np.count_nonzero(side != exact)) for side in (own, twin))
    words = f"{wrong} of {exact.size} numbers differ from the truth, {of_plain} of plain's"
    return Judged(name, exact.size, failures=(words,) if wrong > of_plain else (), notes=("compared exactly",))


def measured_one(
    name: str,
    sides: tuple[Side, Side, Side],
    terms: float,
    response: np.ndarray,
    bounds: Mapping[str, float],
    reason: str,
) -> Judged:
    """Judge a floating-point result.

    sides: mine, plain and truth.
    terms: number of terms in the result's sums.
    response: mean square of its response to relative changes, in its shape.
    bounds, reason: bounds given by the user, and their reason.
    """
    own, twin, exact = (side.of(name) for side in sides)
    shapes = {one.array.shape for side in (own, twin, exact) for one in side}
    size = exact[0].array.size
    if len(shapes) > 1 or not len(own) == len(twin) == len(exact):
        return Judged(name, size, failures=("missing, or of another shape, in a later draw",))
    (c, w, t), failures, left_out = _finite(*([one.array for one in side] for side in (own, twin, exact)))
    default = assert_close_says(own[0], twin[0])
    notes = [f"{left_out} numbers not compared: plain's are not finite"] if left_out else []
    if failures:
        return Judged(name, size, failures=tuple(failures[:2]), notes=tuple(notes), default=default)
    if left_out == size * len(own):
        words = "plain's numbers are not finite, so nothing can be compared"
        return Judged(name, size, untold=words, default=default)
    if own[0].dtype != twin[0].dtype:
        notes.append(f"mine is {own[0].dtype}, plain {twin[0].dtype}")
    found = measure(Sides(c, w, t, twin[0].dtype, response, terms), bounds, reason)
    if NO_DIGIT < found.own < NOTHING:
        words = f"plain's relative error at its dtype is {found.own:.2g}, so zeros would be as good"
        return Judged(name, size, untold=words, default=default)
    k, at = found.draw, found.worst
    numbers = at, k, float(c[k][at]), float(w[k][at]), float(t[k][at])
    judged = Judged(name, size, found, at=numbers, default=default)
    if found.own >= NOTHING:
        notes.append("the truth is zero except for FP64's rounding error")
    if not judged.ok:
        notes += _what_it_is(c, t, found)
    return replace(judged, notes=tuple(notes))


def _finite(
    own: Sequence[np.ndarray], twin: Sequence[np.ndarray], exact: Sequence[np.ndarray]
) -> tuple[tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]], list[str], int]:
    """Return copies with zeros where plain's numbers are not finite, the failures, and the count of those numbers."""
    copies: tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]] = ([], [], [])
    failures, left_out = [], 0
    for draw, (c, w, t) in enumerate(zip(own, twin, exact, strict=True)):
        there = np.isfinite(t) & np.isfinite(w)
        left_out += int(np.count_nonzero(~there))
        wrong = {
            "are not finite, and plain's are": there & ~np.isfinite(c),
            "are infinite in plain, and not so in mine": np.isinf(t) & (t == w) & (c != t),
        }
        for words, bad in wrong.items():
            if bad.any():
                where = [int(axis[0]) for axis in np.nonzero(bad)] if bad.ndim else []
                failures.append(f"{np.count_nonzero(bad)} numbers {words}; the first at {where}, draw {draw}")
        for copy, x in zip(copies, (c, w, t), strict=True):
            copy.append(np.where(there, x, 0.0))
    return copies, failures, left_out


def _what_it_is(own: Sequence[np.ndarray], exact: Sequence[np.ndarray], found: Measured) -> list[str]:
    """Describe the form of a wrong result in words."""
    words = explain(Direction.of(found.ratio, found.residual), {}, found.own)[:1]
    if np.any(exact[0]) and not any(np.any(c) for c in own):
        words.append("all numbers are zero")
    elif own[0].size > 1 and np.ptp(own[0]) == 0 < np.ptp(exact[0]):
        words.append("all numbers are equal")
    elif len(own) > 1 and np.array_equal(own[0], own[1]) and not np.array_equal(exact[0], exact[1]):
        words.append("the same bits on different inputs")
    return words


def assert_close_says(own: Value, twin: Value) -> tuple[bool, str]:
    """Return whether `torch.testing.assert_close(mine, plain)` accepts a result by default, and its result in words."""
    if own.dtype != twin.dtype:
        return False, f"rejects it: dtypes {own.dtype} and {twin.dtype}"
    relative, absolute = DEFAULTS[twin.dtype]
    with np.errstate(invalid="ignore"):
        close = (np.abs(own.array - twin.array) <= absolute + relative * np.abs(twin.array)) | (own.array == twin.array)
    tolerance = f"rtol {relative:g}, atol {absolute:g}"
    if close.all():
        return True, f"lets it through ({tolerance})"
    return False, f"rejects {1 - close.mean():.2g} of the numbers ({tolerance})"
