"""Bound the error that a GPU's matrix units add to a product by the way they sum, and leave room for it in checks.

A CPU adds products of narrow numbers in FP32 and rounds each sum to the nearest. A tensor core adds a step of products
to the running sum at once and drops what lies below the sum's last bit. FP16, bf16 and TF32 have sums of 24 bits, FP8
sums of 14 (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2); FP8 without fast accumulation moves its sums to FP32
after 128 products. Relative to a product of K terms whose partial sums are no larger than itself, at most::

    FP16, bf16    K/16 · 2⁻²³       each step drops less than the last bit, always towards zero
    TF32          K/8 · 2⁻²³
    FP8, fast     2 · √(K/32) · 2⁻¹³    what steps drop had no common sign where it was measured
    FP8           2 · √4 · 2⁻¹³

Measured on an H200 (docs/results/unit_sums.md), K of 128 to 32,768: 0.61 of these at most, and in the products of a
large model 0.14 at least.
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
    """A matrix unit's running sum.

    step: products that are added at once. lost: what a step drops at most, relative to the sum. promoted: products
    after which the sum moves to FP32; 0 = never. one_sign: whether all steps err towards zero.
    """

    step: int
    lost: float
    promoted: int = 0
    one_sign: bool = True

    def error(self, terms: int) -> float:
        """Return the most that a sum of so many products is off, relative to it."""
        steps = min(terms, self.promoted or terms) / self.step
        return self.lost * (steps if self.one_sign else 2.0 * math.sqrt(steps))


NARROW = Accumulator(16, 2.0**-23)
ACCUMULATORS = {"fp16": NARROW, "bf16": NARROW, "tf32": Accumulator(8, 2.0**-23)}
FP8_FAST = Accumulator(32, 2.0**-13, one_sign=False)
FP8 = replace(FP8_FAST, promoted=128)
# A product is rounded once more at the end. An error of one roundoff changes the rounding of this share of its
# elements: an element lies anywhere between two numbers of the format, which are one or two roundoffs apart.
FLIPS = 2.0
# The largest element, row or column may exceed what the norm suggests by this factor: measured 3.8 in FP8, 1.9
# otherwise.
PEAK = 4.0


@dataclass(frozen=True)
class OfSums:
    """The share of a comparison's error that comes from a matrix unit's sums.

    error: the most of ‖c − w‖/‖t‖ that they explain. roundoff: of the format to which the product is rounded. terms: K.
    """

    error: float = 0.0
    roundoff: float = 1.0
    terms: int = 0

    def make_room(self, measures: Sequence[Measure], d: Distances) -> tuple[Measure, ...]:
        """Return measures of a comparison whose bounds leave room for the sums' error; none that all elements may miss.

        An error of an ulp is reached by the sums of products that stay in FP32, such as logits: at 2,048 terms 99 of
        100 elements are other numbers than the twin's. How far they are off is held all the same.
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
        """Return the error in units of the twin's."""
        error = d.twin_relative_error
        return self.error / error if error and math.isfinite(error) else 0.0


NO_SUMS = OfSums()


def of_sums(config: RunConfig, stage: Operation, role: str, inputs: Mapping[str, np.ndarray]) -> OfSums:
    """Return the part of the sums in a stage's output (role OUTPUT), or in its gradient of an input.

    inputs: those of the stage by role, and `grad`, that of its output, where there is one. A CPU, FP32 and FP64 have
    none.
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
    """Return the number of products that one number sums."""
    x = inputs[next(iter(stage.reads))]
    if not stage.params:  # attention sums scores over a head's numbers, its output and gradients over positions
        return int(max(x.shape[1], x.shape[-1]))
    if role == OUTPUT:
        return int(x.shape[-1])
    return math.prod(x.shape[:2]) if role in stage.params else int(inputs["grad"].shape[-1])


def _wider(measure: Measure, more: float, said: str) -> Measure:
    low = measure.low if measure.low is None or measure.low > 0 else measure.low - more
    high = None if measure.high is None else measure.high + more
    return replace(measure, low=low, high=high, basis=measure.basis + said.format(more))
