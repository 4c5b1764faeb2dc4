"""Judge a function: compare it with the plain one at its dtype and in FP64, on every draw, result by result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from lockstep.core.errors import UserError
from lockstep.core.parity.honest.draws import Draws
from lockstep.core.parity.honest.function import Given
from lockstep.core.parity.honest.judged import Judged, exact_one, measured_one
from lockstep.core.parity.honest.sides import Functions, Side
from lockstep.core.parity.honest.truth import Truth, truth_of

__tracebackhide__ = True

# A wrong result within this relative distance of another result's truth gets a note with its name.
SAME = 0.1


def judge(
    functions: Functions,
    inputs: Sequence[Given],
    draws: Draws,
    count: int,
    bounds: Mapping[str, float],
    reason: str,
) -> tuple[Judged, ...]:
    """Call the three functions on `count` draws, and judge every output and gradient.

    Raises UserError if `plain` cannot give the truth (it refuses FP64, or narrows it), or if nothing could be compared.
    If a single result cannot be judged, it is raised only if all other results are correct.
    """
    truth = truth_of(functions, draws)
    exact = truth.answer
    sides = Side(), Side(), Side([exact])
    for draw in range(count):
        values = draws.values(draw)
        cotangents = partial(draws.cotangents, draw)
        sides[0].answers.append(functions.mine(values, False, cotangents))
        sides[1].answers.append(functions.plain(values, False, cotangents))
        if draw:
            sides[2].answers.append(functions.truth(values, True, cotangents))
    found = list(_judged(sides, truth, bounds, reason))
    written = sorted(set(sides[0].answers[0].written) - set(sides[1].answers[0].written))
    found += [Judged(f"input {name}", 0, failures=("mine changed it, and plain does not",)) for name in written]
    if not any(one.measured is not None or one.failures or one.untold for one in found):
        raise UserError("nothing was compared: plain has no output with finite floating-point numbers")
    wanted = [one.name for one in inputs if one.differentiate]
    if wanted and all(g is None for g in exact.grads.values()):
        raise UserError(
            f"plain gives no gradient to {', '.join(wanted)}: differentiate=False compares only the forward pass"
        )
    if all(one.ok for one in found) and (
        untold := [f"nothing can be judged of {o.name}: {o.untold}" for o in found if o.untold]
    ):
        raise UserError(*untold)
    return _named_after_others(found, sides)


def _judged(sides: tuple[Side, Side, Side], found: Truth, bounds: Mapping[str, float], reason: str) -> Iterator[Judged]:
    """Judge each result of the truth, then report the outputs that only mine has."""
    mine, plain, truth = (side.results(0) for side in sides)
    backward = sides[0].answers[0].backward
    for name, exact in truth.items():
        if exact is None:
            if (extra := mine.get(name)) is not None and np.any(extra.array):
                yield Judged(name, extra.array.size, failures=("plain gives no gradient, and mine is not zero",))
            continue
        is_gradient = name not in sides[2].answers[0].outputs
        if is_gradient and not backward:
            continue
        if (twin := plain.get(name)) is None or twin.array.shape != exact.array.shape:
            raise UserError(f"plain has {name} in FP64, and not the same in its dtype")
        if (own := mine.get(name)) is None:
            if is_gradient and not np.any(exact.array):
                continue
            yield Judged(name, exact.array.size, failures=("missing",))
        elif own.array.shape != exact.array.shape:
            words = f"shape {own.array.shape}, plain's is {exact.array.shape}"
            yield Judged(name, exact.array.size, failures=(words,))
        elif own.floating != exact.floating:
            yield Judged(name, exact.array.size, failures=(f"{own.dtype}, plain's is {twin.dtype}",))
        elif not exact.floating:
            yield exact_one(name, sides)
        elif exact.array.size:
            yield measured_one(name, sides, found.terms[name], found.response[name], bounds, reason)
    for name in sorted(set(sides[0].answers[0].outputs) - set(sides[2].answers[0].outputs)):
        yield Judged(name, 0, failures=("plain has no such output",))


def _named_after_others(found: Sequence[Judged], sides: tuple[Side, Side, Side]) -> tuple[Judged, ...]:
    """Add a note to each wrong result that is near the truth of another one."""
    mine, _, truth = (side.results(0) for side in sides)
    said = []
    for one in found:
        own = mine.get(one.name)
        if not one.ok and own is not None and own.floating:
            others = {n: x.array for n, x in truth.items() if x is not None and n != one.name}
            like = [(n, apart) for n, x in others.items() if (apart := _apart(own.array, x)) < SAME]
            if like:
                one = replace(one, notes=(*one.notes, f"it is {like[0][0]}'s, to {like[0][1]:.1g}"))
        said.append(one)
    return tuple(said)


def _apart(x: np.ndarray, t: np.ndarray) -> float:
    """Return ‖x − t‖ / ‖t‖; infinite if shapes differ or the truth is zero."""
    if x.shape != t.shape or not np.any(t):
        return np.inf
    with np.errstate(invalid="ignore"):
        return float(np.linalg.norm(x - t) / np.linalg.norm(t))
