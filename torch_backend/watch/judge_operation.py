"""Judge one operation: compare its results with the same operation in FP64, from the same inputs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.core.data.memory import available_memory_bytes
from lockstep.core.parity.honest.function import EPS
from lockstep.core.parity.measures.verdict import Measure
from lockstep.core.parity.watch import operation_bounds
from lockstep.core.parity.watch.formulas import Formula
from lockstep.core.parity.watch.operation_bounds import BESIDE, DRAWS, Sides
from lockstep.torch_backend.watch.recompute import (
    BY_JAX,
    BY_KERNEL,
    BY_REFERENCE,
    Call,
    NotJudged,
    Recompute,
    rounded,
    terms_of,
)

log = logging.getLogger("lockstep.watch")

# Operations that only move numbers, or round each number once.
MOVES = frozenset(
    {
        "_to_copy", "clone", "copy", "cat", "stack", "where", "masked_fill", "masked_scatter", "embedding",
        "slice_backward", "select_backward", "slice_scatter", "select_scatter", "constant_pad_nd", "index", "gather",
        "index_select", "repeat", "flip", "roll", "tril", "triu", "threshold_backward", "relu", "neg", "abs",
        "repeat_interleave", "_unsafe_index",
    }
)  # fmt: skip
# Element-wise operations that compute in FP32 or wider and round each number once.
ROUNDS_ONCE = frozenset(
    {
        "add", "sub", "rsub", "mul", "div", "neg", "exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh",
        "sigmoid", "gelu", "gelu_backward", "silu", "silu_backward",
    }
)  # fmt: skip
NARROW = (torch.bfloat16, torch.float16)
# Number of FP64 copies of inputs and results that exist at the same time.
COPIES = 6

# Measures of one result, its size, the share of elements that differ from the twin, and its index among the results.
Judged = tuple[tuple[Measure, ...], int, float | None, int]


class JudgeOperation:
    """A judge that recomputes operations and measures their results."""

    def __init__(self, formulas: Mapping[str, Formula]) -> None:
        self._again = Recompute(formulas)

    def __call__(self, call: Call, results: Sequence[Any]) -> tuple[str, list[Judged]]:
        """Return the way in which the truth was computed, and the measures of each result of a call.

        Raises NotJudged, with the reason, if no way computes a truth.
        """
        tensors = [x for x in results if isinstance(x, Tensor)]
        needed = 8 * COPIES * sum(x.numel() for x in (*call.floating, *tensors))
        if 0 < (free := available_memory_bytes()) < needed:
            raise NotJudged(f"copies in FP64 take {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free")
        values = self._again.values(call)
        ways, why = self._again.ways(call), ""
        for way in ways:
            try:
                truths = self._again(call, values, True, way)
                return way, self._judged(call, results, values, truths, way)
            except NotJudged:
                raise
            except Exception as error:
                # The next way may support these arguments.
                log.debug("watch: %s %s", call.name, way, exc_info=True)
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise NotJudged(f"{call.name} does not run in FP64 ({why})")

    def _judged(
        self, call: Call, results: Sequence[Any], values: list[np.ndarray], truths: Sequence[Any], way: str
    ) -> list[Judged]:
        if len(truths) < len(results):
            raise ValueError(f"{len(truths)} results in place of {len(results)}")
        moves = call.name.partition(".")[2] in MOVES
        twins = self._twins(call, values, way)
        found: list[Judged] = []
        more: list[tuple[Sequence[Any], Sequence[Any]]] = []
        for i, result in enumerate(results):
            t = truths[i]
            if not isinstance(result, Tensor) or t is None or not result.numel():
                continue
            own = result.detach().to("cpu")
            c = (own.double() if own.is_floating_point() else own).numpy()
            if c.size != t.size:
                raise ValueError(f"shape {t.shape} in place of {c.shape}")
            c = c.reshape(t.shape)
            if not own.is_floating_point():
                found.append(((operation_bounds.exact(c, t),), c.size, None, i))
                continue
            if moves:
                found.append(((operation_bounds.exact(c, rounded(t, own.dtype)),), c.size, None, i))
                continue
            dtype = str(own.dtype).rpartition(".")[2]
            if dtype not in EPS:
                raise NotJudged(f"results of dtype {dtype}")
            terms, resolution = terms_of(call, t), _resolution(call, i)
            w = _rounded(twins, i, own.dtype)
            length = way in (BY_JAX, BY_REFERENCE) or own.dtype not in NARROW
            measures = operation_bounds.measured(Sides(c, [t], w, dtype, terms, resolution), length)
            if not all(m.ok for m in measures):
                # Before a fault is reported, measure again with slightly changed inputs: the error may be sensitive.
                more = more or [self._beside(call, values, draw, way) for draw in range(DRAWS)]
                all_truths = [t, *(x for one, _ in more if (x := one[i]) is not None)]
                all_twins = w + [x for _, two in more for x in _rounded(two, i, own.dtype)]
                sides = Sides(c, all_truths, all_twins, dtype, terms, resolution)
                measures = operation_bounds.measured(sides, length)
            if w and own.dtype in NARROW and call.name.partition(".")[2] in ROUNDS_ONCE:
                measures = (*measures, operation_bounds.unequal(c, w[0], twins[i], t, dtype))
            unequal = float(np.mean(c != w[0])) if w else None
            found.append((measures, c.size, unequal, i))
        return found

    def _twins(self, call: Call, values: Sequence[np.ndarray], way: str) -> Sequence[Any]:
        """Compute the results in FP32; [] for the candidate's own kernel, or if a reference cannot run in FP32."""
        if way == BY_KERNEL:
            return []
        try:
            return self._again(call, values, False, way)
        except Exception:
            log.debug("watch: %s %s has no twin", call.name, way, exc_info=True)
            return []

    def _beside(
        self, call: Call, values: Sequence[np.ndarray], draw: int, way: str
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return truths and twins for inputs that differ from the given ones by a few roundings."""
        random = np.random.default_rng(draw)
        with np.errstate(invalid="ignore", over="ignore"):
            moved = [
                (x * (1 + BESIDE * random.standard_normal(x.shape))).astype(np.float32).astype(np.float64)
                for x in values
            ]
        return self._again(call, moved, True, way), self._twins(call, moved, way)


def _resolution(call: Call, i: int) -> float:
    """Return the root mean square of one rounding of an attention weight, exp(score − lse), as an error of the lse.

    It is 0 for other results. torch's attention kernels for narrow operands use a fast exponential with a relative
    error of 6e-5 for weights that they round to bf16.
    """
    narrow = call.floating[0].dtype if call.floating else None
    if "attention" not in call.name or "backward" in call.name or i == 0 or narrow not in NARROW:
        return 0.0
    return float(torch.finfo(narrow).eps) / 12**0.5


def _rounded(twins: Sequence[Any], i: int, dtype: torch.dtype) -> list[np.ndarray]:
    """Return a list with the twin of a result, rounded to the result's dtype; [] if there is no twin."""
    return [rounded(twins[i], dtype)] if i < len(twins) and twins[i] is not None else []
