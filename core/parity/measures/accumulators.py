"""Bound the error that the accumulators of a GPU's matrix units add to a product, and widen checks by it.

A CPU adds products of narrow numbers in FP32 and rounds each sum to the nearest number. A tensor core adds several
products to the running sum in one step and drops the bits below the sum's last bit. Its sums have 24 bits for FP16,
bf16 and TF32, and 14 bits for FP8 (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2). FP8 without fast accumulation
moves its sums to FP32 after 128 products. For a product of K terms whose partial sums are no larger than the product,
the relative error is at most::

    FP16, bf16    K/16 · 2⁻²³         a step drops less than the last bit, always towards zero
    TF32          K/8 · 2⁻²³
    FP8, fast     2 · √(K/32) · 2⁻¹³    dropped bits had no common sign in the measurement
    FP8           2 · √4 · 2⁻¹³

Measured on an H200 for K of 128 to 32,768 (docs/results/unit_sums.md): errors reach at most 0.61 of these bounds, and
at least 0.14 of them in the products of a large model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.core.components.precision import FORMATS, POLICIES
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.graph import KINDS, OUTPUT, Operation
from lockstep.core.model.names import in_fp8
from lockstep.core.parity.measures.distances import Distances
from lockstep.core.parity.measures.verdict import Measure


@dataclass(frozen=True)
class Accumulator:
    """The running sum of a matrix unit.

    step: number of products added at once.
    lost: the most that a step drops, relative to the sum.
    promoted: number of products after which the sum moves to FP32; 0 = never.
    one_sign: whether all steps err towards zero.
    """

    step: int
    lost: float
    promoted: int = 0
    one_sign: bool = True

    def error(self, terms: int) -> float:
        """Return the largest error of a sum of `terms` products, relative to the sum."""
        steps = min(terms, self.promoted or terms) / self.step
        return self.lost * (steps if self.one_sign else 2.0 * math.sqrt(steps))


NARROW = Accumulator(16, 2.0**-23)
ACCUMULATORS = {"fp16": NARROW, "bf16": NARROW, "tf32": Accumulator(8, 2.0**-23)}
FP8_FAST = Accumulator(32, 2.0**-13, one_sign=False)
FP8 = replace(FP8_FAST, promoted=128)
# A product is rounded once more at the end. An error of one roundoff changes the rounding of this share of its
# elements, because two neighbours in the format are one or two roundoffs apart.
FLIPS = 2.0
# The largest element, row or column may exceed the norm's estimate by this factor. Measured: 3.8 in FP8, 1.9 otherwise.
PEAK = 4.0


@dataclass(frozen=True)
class OfSums:
    """The part of a comparison's error that a matrix unit's sums may cause.

    error: largest ‖c − w‖/‖t‖ that the sums explain.
    roundoff: roundoff of the format to which the product is rounded.
    terms: K, the number of products in a sum.
    """

    error: float = 0.0
    roundoff: float = 1.0
    terms: int = 0

    def make_room(self, measures: Sequence[Measure], d: Distances) -> tuple[Measure, ...]:
        """Return the measures with bounds widened by the sums' error, without those whose bound then allows anything.

        An error of an ulp is possible in sums of products that stay in FP32, such as logits: with 2,048 terms, 99 of
        100 elements differ from the twin's. So `unequal` is dropped there, and the size of the differences stays
        bounded.
        """
        ratio = self.in_units(d)
        if not ratio:
            return tuple(measures)
        more = {
            "excess": ratio,
            "twin_distance": ratio,
            "gain_difference": self.error,
            "row_gain": ratio,
            "largest_element": PEAK * ratio,
            "largest_row": PEAK * ratio,
            "largest_column": PEAK * ratio,
            "unequal": FLIPS * self.error / self.roundoff,
        }
        said = f"; +{{:.2g}}: a matrix unit's sums of {self.terms:,} products"
        wider = (_wider(one, more[one.name], said) if more.get(one.name) else one for one in measures)
        return tuple(one for one in wider if one.name != "unequal" or one.high is None or one.high < 1)

    def in_units(self, d: Distances) -> float:
        """Return the error in units of the twin's error; 0 if the twin has none."""
        error = d.twin_relative_error
        return self.error / error if error and math.isfinite(error) else 0.0


NO_SUMS = OfSums()


def of_sums(config: RunConfig, stage: Operation, role: str, inputs: Mapping[str, np.ndarray]) -> OfSums:
    """Return the part of the sums in a stage's output (role OUTPUT), or in its gradient with respect to an input.

    inputs: the stage's inputs by role, and under `grad` the gradient of its output, if there is one.
    On a CPU, and in FP32 and FP64, there is no such part.
    """
    kind = KINDS[stage.kind]
    if config.device != "cuda" or not kind.rounds_operands or role == "bias":
        return NO_SUMS
    operand = POLICIES[config.precision.policy].operand
    accumulator = ACCUMULATORS.get(operand)
    if in_fp8(config, stage):
        accumulator = FP8_FAST if role == OUTPUT and config.precision.fp8_fast_accumulation else FP8
    if accumulator is None:
        return NO_SUMS
    terms = _terms(stage, role, inputs)
    rounded = role not in kind.kept and not FORMATS[operand].as_read
    return OfSums(accumulator.error(terms), FORMATS[operand if rounded else "fp32"].roundoff, terms)


def _terms(stage: Operation, role: str, inputs: Mapping[str, np.ndarray]) -> int:
    """Return the number of products in one sum."""
    x = inputs[next(iter(stage.reads))]
    if not stage.params:  # attention sums scores over the head dimension, the rest over positions
        return int(max(x.shape[1], x.shape[-1]))
    if role == OUTPUT:
        return int(x.shape[-1])
    return math.prod(x.shape[:2]) if role in stage.params else int(inputs["grad"].shape[-1])


def _wider(measure: Measure, more: float, said: str) -> Measure:
    low = measure.low if measure.low is None or measure.low > 0 else measure.low - more
    high = None if measure.high is None else measure.high + more
    return replace(measure, low=low, high=high, basis=measure.basis + said.format(more))
