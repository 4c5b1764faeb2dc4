"""Compute the truth: the plain function in FP64, and the response of its results to small changes.

The function must not narrow FP64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import numpy as np

from lockstep.core.errors import UserError
from lockstep.core.parity.honest.draws import SMALL, Draws
from lockstep.core.parity.honest.function import Answer, Function, Value
from lockstep.core.parity.honest.sides import Functions, gradient_name

__tracebackhide__ = True

# If this many different non-integers are all exact in FP32, the function narrows FP64: each of them has a probability
# of 2⁻²⁹ to be exact by chance.
ENOUGH = 4
RESPONSES = 2


@dataclass(frozen=True)
class Truth:
    """The truth of the given draw.

    terms: result → number of terms in its sums.
    response: result → mean square of its response to relative changes (measures.py).
    """

    answer: Answer
    terms: dict[str, float]
    response: dict[str, np.ndarray]


def truth_of(functions: Functions, draws: Draws) -> Truth:
    """Call the truth's function on the given inputs and near them.

    Raises UserError if it refuses FP64 where plain runs at its dtype, if it narrows FP64, or if it has no numbers to
    compare.
    """
    truth, values = functions.truth, draws.values(0)
    cotangents = partial(draws.cotangents, 0)
    try:
        exact = truth(values, True, cotangents, True)
    except UserError:
        raise
    except Exception as error:
        try:
            functions.plain(values, False, cotangents)
        except Exception:
            raise error from None  # it fails in both dtypes, so FP64 is not the reason
        words = str(error).strip().splitlines() or [""]
        raise UserError(
            f"plain does not run in FP64 ({type(error).__name__}: {words[0]}): let it compute in the dtype of its "
            "inputs, or give a function that does as truth="
        ) from error
    if exact.narrowed:
        _refuse(f"({', '.join(exact.narrowed)})")
    base = _floating(exact)
    if not base:
        raise UserError("nothing was compared: plain has no floating-point output")
    if narrow := sorted(name for name, one in base.items() if one.dtype != "float64"):
        _refuse(f"({', '.join(narrow)} is {base[narrow[0]].dtype})")
    squares = {name: np.zeros(one.array.shape) for name, one in base.items()}
    for salt in range(RESPONSES):
        given = draws.responding(draws.cotangents(0, _shapes(exact)), RESPONSES + salt) if exact.grads else {}
        moved = _floating(truth(draws.responding(values, salt), True, partial(_these, given)))
        if salt == 0 and (narrow := sorted(n for n, one in moved.items() if _of_fp32(one.array))):
            _refuse(f"(all numbers of {', '.join(narrow)} are FP32's)")
        with np.errstate(invalid="ignore"):
            for name, one in moved.items():
                off = (one.array - base[name].array) / SMALL
                squares[name] += np.square(np.where(np.isfinite(off), off, 0.0)) / RESPONSES
    return Truth(exact, _terms(truth, draws, values, exact, base), squares)


def _shapes(answer: Answer) -> dict[str, tuple[int, ...]]:
    return {name: one.array.shape for name, one in answer.outputs.items() if one.floating}


def _refuse(where: str) -> NoReturn:
    raise UserError(
        f"plain narrows FP64 inside {where}, so it cannot give the truth: let it compute in the dtype of its inputs, "
        "or give a function that does as truth="
    )


def _of_fp32(x: np.ndarray) -> bool:
    """Return whether all non-integers are exact in FP32, although the inputs are not. False for fewer than ENOUGH."""
    found = np.unique(x[np.isfinite(x) & (x != np.rint(x))])
    with np.errstate(over="ignore"):
        return found.size >= ENOUGH and bool(np.all(found.astype(np.float32) == found))


def _floating(answer: Answer) -> dict[str, Value]:
    found = {**answer.outputs, **{gradient_name(n): g for n, g in answer.grads.items() if g is not None}}
    return {name: one for name, one in found.items() if one.floating and one.array.size}


def _these(given: Mapping[str, np.ndarray], _: Mapping[str, tuple[int, ...]]) -> Mapping[str, np.ndarray]:
    return given


def _terms(
    truth: Function, draws: Draws, values: Mapping[str, np.ndarray], exact: Answer, base: Mapping[str, Value]
) -> dict[str, float]:
    """Count the numbers of one input, or of one output's gradient, on which each result depends at most."""
    terms = dict.fromkeys(base, 1.0)
    grads = draws.cotangents(0, _shapes(exact)) if exact.grads else {}

    def see(answer: Answer, size: int) -> None:
        for name, one in _floating(answer).items():
            if name in base and one.array.shape == base[name].array.shape:
                changed = np.count_nonzero(one.array != base[name].array)
                terms[name] = max(terms[name], size * changed / one.array.size)

    for i, (name, x) in enumerate(values.items()):
        if (changed := draws.one_changed(x, i)) is not None:
            see(truth({**values, name: changed}, True, partial(_these, grads)), x.size)
    for i, (name, g) in enumerate(grads.items()):
        if (changed := draws.one_changed(g, len(values) + i)) is not None:
            see(truth(values, True, partial(_these, {**grads, name: changed})), g.size)
    return terms
