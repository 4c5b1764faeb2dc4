"""Judge the step as it runs: with its own loss weights, all of its sequences and all of its micro-batches.

The micro-batch whose stages are shown has uneven weights on a few sequences. A program may have a branch for weights
that are all 1, or a fault in other rows or in a fourth micro-batch. So the step's own NLL and gradients are compared
with the reference end to end, and its accumulated gradients with the sum over its micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lockstep.core.backend import Batch, NotSupported
from lockstep.core.components.precision import FORMATS
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.names import cancelled, parameter_shapes
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.observations import PARAMETER, PROBE_NLL, Observation, observed, sketch_distances
from lockstep.core.parity.evidence.probe import is_text_of
from lockstep.core.parity.evidence.sketch import K
from lockstep.core.parity.judge import end_to_end
from lockstep.core.parity.judge.amaxes import amaxes
from lockstep.core.parity.judge.end_to_end import Observations, Repeated
from lockstep.core.parity.judge.update import step_is_made
from lockstep.core.parity.measures import calibrated_bounds
from lockstep.core.parity.measures.compare import FEW_ULPS, Reference, exact, finding
from lockstep.core.parity.measures.scatter import scatter
from lockstep.core.parity.measures.verdict import Finding, Measure
from lockstep.core.train.loss_scale import SCALE

# Two results that differ only by some roundings are closer than a roundoff divided by this.
ROUNDINGS = 8
# Clean FP32 runs reached 2e-6 where the terms of a gradient do not cancel.
LEAST_APART = 1e-4
# Part of the note of each finding.
OWN = "the step with its own weights"


@dataclass(frozen=True)
class Shown:
    """The part of the step that the reference repeats.

    batch: tokens and weights of this part.
    found: the candidate's observations of it.
    weight: divisor of its loss; None for the batch's own weight.
    """

    batch: Batch
    found: Observations
    weight: float | None = None


def shown(evidence: Evidence, reference: Reference, missing: list[str]) -> Shown | None:
    """Return the whole step in a thorough check, else one of its micro-batches. None if its gradients are not shown."""
    if evidence.stepped is None:
        return None
    number = part_repeated(evidence, reference.config)
    if number is None:
        return Shown(evidence.batch, end_to_end.observations(evidence.stepped, {}, reference.config.model))
    if not evidence.own:
        missing.append("the step's own gradients end to end: gradients of single micro-batches are unknown")
        return None
    micros = evidence.batch.cut(reference.config.train)
    if len(evidence.own) != len(micros):  # `_accumulated` reports the wrong number
        return None
    rows = len(micros[0].tokens)
    nll = evidence.stepped.nll[number * rows : (number + 1) * rows]
    missing.append(f"the step's own gradients end to end, of {len(micros) - 1} of its micro-batches: in other checks")
    weight = float(evidence.batch.weights.sum(dtype=np.float64)) if evidence.own_in_step else None
    return Shown(micros[number], {PROBE_NLL: observed(nll), **evidence.own[number]}, weight)


def part_repeated(evidence: Evidence, config: RunConfig) -> int | None:
    """Return the number of the micro-batch that the reference repeats; None if it repeats all.

    A thorough check repeats all. Otherwise the digest of the step's batch selects one.
    """
    count = len(evidence.batch.cut(config.train))
    return None if evidence.thorough or count == 1 else int(evidence.batch.digest()[8:16], 16) % count


def findings(
    evidence: Evidence, reference: Reference, missing: list[str]
) -> tuple[list[Finding], Observations, Repeated | None]:
    """Compare the step end to end, and with the sum of its micro-batches.

    Returns the findings, the candidate's observations, and those of the reference. Nothing is compared end to end if
    the reference gives no gradients.
    """
    part = shown(evidence, reference, missing)
    repeated = None
    found: list[Finding] = []
    if part is not None:
        try:
            repeated = end_to_end.repeat_alone(evidence.before, part.batch, reference, part.weight)
            # Means over checks include only the probe, whose batch is always of one kind.
            found += end_to_end.compare_with(part.found, repeated, replace(reference, over_steps=None))
        except NotSupported as reason:
            missing.append(f"the step's own gradients end to end: {reason}")
    whole = part is not None and part.batch is evidence.batch
    of_amaxes = amaxes(evidence, reference, step_is_made(evidence, reference), repeated, whole)
    found += _accumulated(evidence, reference, repeated, missing)
    found += under_other_weights(evidence, reference, repeated)
    named = [replace(one, note="; ".join(note for note in (one.note, OWN) if note)) for one in found]
    return [*named, *of_amaxes], {} if part is None else part.found, repeated


def _accumulated(
    evidence: Evidence, reference: Reference, repeated: Repeated | None, missing: list[str]
) -> Iterator[Finding]:
    """Compare the step's gradients with the sum over its micro-batches, from sketches.

    A micro-batch that was computed separately contributes its share of the loss weight. With several ranks the sum
    includes the reduction, and its findings have that name.
    """
    if not evidence.own or evidence.stepped is None or evidence.not_finite:
        return
    config = reference.config
    micros = evidence.batch.cut(config.train)
    total = float(evidence.batch.weights.sum(dtype=np.float64))
    shares = [float(micro.weights.sum(dtype=np.float64)) / total for micro in micros]
    stage = "accumulation" if config.train.ranks == 1 else "reduction"
    rounds = not evidence.own_in_step and _rounds_otherwise(shares, evidence.before.scalars.get(SCALE, 1.0))
    shares = [1.0] * len(shares) if evidence.own_in_step else shares
    if rounds and repeated is None:
        missing.append(f"{stage} of the step's micro-batches: the difference of honest ones is unknown")
        return
    if len(shares) != len(evidence.own):
        yield exact(stage, "micro-batches", abs(len(shares) - len(evidence.own)), len(shares), "one part each")
        return
    # These gradients are only rounding errors, which differ if a micro-batch runs separately.
    passed_over = cancelled(config.model) if rounds else {}
    for name in parameter_shapes(config.model):
        if name in passed_over:
            continue
        key = PARAMETER + name
        parts = [one.get(key) for one in evidence.own]
        if name not in evidence.stepped.grads or None in parts:
            yield exact(stage, name, 1, 1, "step and micro-batches have this gradient")
            continue
        there = [part for part in parts if part is not None]
        whole = observed(evidence.stepped.grads[name])
        if whole.nonfinite and any(part.nonfinite for part in there):
            continue  # a sum of non-finite parts is not finite either
        if not evidence.own_in_step and SCALE in evidence.before.scalars and any(part.nonfinite for part in there):
            # A separate micro-batch of little weight has larger gradients than in the step.
            missing.append(f"{stage} at {name}: a micro-batch by itself overflows at this loss scale")
            continue
        yield _sum(stage, name, whole, there, shares, reference, repeated if rounds else None)


def under_other_weights(evidence: Evidence, reference: Reference, repeated: Repeated | None) -> Iterator[Finding]:
    """Compare the candidate under the step's own weights with itself under other weights, if its program repeats bits.

    The NLL of a token does not depend on weights, so it has the bits of the same token in `tapped`. The gradients of
    `reweighted_batches` equal those with the own weights up to a few roundings. No reference is involved, so the
    difference may be far below the usual rounding error. The smallest difference over the batches counts. In a single
    batch, one changed rounding in a token that outweighs the others can change all later roundings of this token (a
    clean run reached four times the bound). A fault is in all batches.

    In FP32 every rounding may change, so two results with independent errors of the twin's size are allowed too. Where
    the terms of a gradient of q or k cancel, that is more than the other bound: the twin's error was 3.7e-3 of such a
    gradient, and a clean run's difference 1.2e-4.
    """
    config = reference.config
    if evidence.stepped is None or not evidence.taps_keep_bits or config.device == "cuda":
        return
    of_step = nll_of_tapped(evidence, config)
    if of_step is not None and evidence.probed is not None and of_step.nll.shape == evidence.probed.nll.shape:
        # Where the probe adds an end of text, its tokens differ.
        same = evidence.tapped.targets == of_step.batch.targets
        same &= evidence.tapped.tokens == of_step.batch.tokens
        own, nll = of_step.nll[same], evidence.probed.nll[same]
        unequal = float(np.mean((own != nll) & ~(np.isnan(own) & np.isnan(nll))))
        measure = Measure("unequal", unequal, None, 0.0, "a token's NLL does not depend on loss weights")
        yield finding("nll", "nll", "end_to_end", (measure,), own.size, unequal, phase="forward")
    first = evidence.own[0] if evidence.own else None
    least = max(LEAST_APART, _some_roundings(evidence, config))
    without_gradient = {PARAMETER + name for name in cancelled(config.model)}
    for name in dict.fromkeys(name for one in evidence.reweighted for name in one if name not in without_gradient):
        given = evidence.stepped.grads
        parameter = name.removeprefix(PARAMETER)
        theirs = first.get(name) if first else observed(given[parameter]) if parameter in given else None
        others = [one.get(name) for one in evidence.reweighted]
        alike = [one for one in others if one is not None and theirs is not None and one.size == theirs.size]
        if theirs is None or len(alike) < len(others):
            yield exact("gradients", parameter, 1, 1, "a gradient with the step's own weights and with others")
            continue
        if theirs.nonfinite and all(one.nonfinite for one in alike):
            continue  # both overflow in the same way
        most, basis = least, "a fraction of a roundoff"
        if repeated is not None and config.precision.chosen.in_fp32:
            error, margin = _honest_error(parameter, reference, repeated)
            if (both := margin * math.sqrt(2) * error) > least:
                most, basis = both, f"{margin:.2g}·√2 of the twin's error {error:.1e}, as any rounding may change"
        apart = min((_apart(theirs, one, most, basis) for one in alike), key=lambda measure: measure.value)
        yield finding("gradients", parameter, "end_to_end", (apart,), theirs.size, phase="backward")


class OfStep(NamedTuple):
    """A micro-batch of the step as the step ran it, and its NLL (B, S)."""

    batch: Batch
    nll: np.ndarray


def nll_of_tapped(evidence: Evidence, config: RunConfig) -> OfStep | None:
    """Return the step's micro-batch from which the tapped one was made, and its NLL in the step.

    None if the step shows no NLL or does not contain this text.
    """
    micros = evidence.batch.cut(config.train)
    number = next((i for i, one in enumerate(micros) if is_text_of(evidence.tapped, one)), None)
    if number is None or evidence.stepped is None:
        return None
    rows = len(micros[number].tokens)
    nll = evidence.stepped.nll[number * rows : (number + 1) * rows]
    return OfStep(micros[number], nll) if nll.shape == micros[number].weights.shape else None


def _some_roundings(evidence: Evidence, config: RunConfig) -> float:
    """Return the largest relative difference of two gradients if a few elements are rounded differently."""
    if SCALE in evidence.before.scalars:
        # A format that needs a loss scale has fewer bits for small numbers.
        return FORMATS["bf16"].roundoff
    return FORMATS[config.precision.operand].roundoff / ROUNDINGS


def _apart(one: Observation, other: Observation, most: float, basis: str) -> Measure:
    """Measure the relative distance of two gradients, with the bound `most` and its basis."""
    apart = one.sketch.astype(np.float64) - other.sketch.astype(np.float64)
    length = float(np.linalg.norm(one.sketch.astype(np.float64)))
    distance = float(np.linalg.norm(apart)) / length if length else float(np.linalg.norm(apart))
    basis = f"the same gradient with loss weights twice as large, but one by an ulp: {basis}"
    return Measure("relative_error", distance, None, most, basis)


def _rounds_otherwise(shares: list[float], scale: float) -> bool:
    """Return whether a separate micro-batch is rounded differently than in the step.

    A share that is a power of two scales every number exactly. In FP16, numbers may overflow or become subnormal.
    """
    return scale != 1.0 or any(share > 0 and math.frexp(share)[0] != 0.5 for share in shares)


def _sum(
    stage: str,
    name: str,
    whole: Observation,
    parts: list[Observation],
    shares: list[float],
    reference: Reference,
    repeated: Repeated | None,
) -> Finding:
    """Compare one gradient with the sum of its parts.

    The bound is a few ulp of the norm, √A more for A additions, and √(n / K) more for a sketch of n numbers, whose K
    sums have n / K terms each (Higham & Mary 2019, theorem 2.4, to first order). The bound is larger where parts
    cancel. If parts are rounded differently than in the step (`repeated` is given), two results with independent errors
    of the twin's size are allowed too.
    """
    if any(part.size != whole.size for part in parts):
        return exact(stage, name, 1, whole.size, "sizes must be equal")
    # A micro-batch without any weight has no mean and contributes nothing.
    sketches = [share * part.sketch.astype(np.float64) for share, part in zip(shares, parts, strict=True) if share]
    together = np.sum(sketches, axis=0)
    size = float(np.linalg.norm(together))
    apart = float(np.linalg.norm(whole.sketch.astype(np.float64) - together))
    quadrature = math.sqrt(sum(float(one @ one) for one in sketches))
    sums = FEW_ULPS + math.sqrt(len(parts)) + math.sqrt(whole.size / K)
    eps = float(np.finfo(reference.stream).eps)
    high = sums * eps * max(1.0, quadrature / size if size else 1.0)
    basis = f"{FEW_ULPS:g} + √{len(parts)} additions + √(n/{K}) of a sketch, ulp"
    if repeated is not None:
        error, margin = _honest_error(name, reference, repeated)
        high += margin * math.sqrt(2) * error * max(1.0, quadrature / size if size else 1.0)
        basis += f", and {margin:.2g}·√2 of the twin's error {error:.1e}: a separate part is rounded differently"
    if (narrow := _narrow(reference)) and size:
        high += reference.config.train.ranks * narrow * sum(float(np.linalg.norm(one)) for one in sketches) / size
        basis += f", and {reference.config.train.ranks} roundings of {narrow:.1e}"
    relative = apart / size if size else (math.inf if apart else 0.0)
    if not math.isfinite(apart):
        relative = math.inf
    measure = Measure("relative_difference", relative, None, high, basis)
    return finding(stage, name, "local", (measure,), whole.size)


def _honest_error(name: str, reference: Reference, repeated: Repeated) -> tuple[float, float]:
    """Return the twin's relative error in a gradient, and the margin on it."""
    if reference.config.precision.exact:
        return calibrated_bounds.FP64_LIMIT, 1.0
    w, t = (side[PARAMETER + name] for side in (repeated.twin, repeated.truth))
    error = sketch_distances(w, w, t, reference.stream).twin_relative_error
    size = min(t.independent, repeated.errors, K)
    margin = calibrated_bounds.MARGIN * scatter(size)
    if reference.config.precision.chosen.in_fp32:
        error = max(error, calibrated_bounds.FP32_LIMIT / margin)
    return error, margin


def _narrow(reference: Reference) -> float:
    """Return the unit roundoff of the format in which ranks sum their gradients; 0 for one rank, or for FP32 sums."""
    roundoffs: Mapping[str, float] = {"bf16": 2.0**-8, "fp16": 2.0**-11}
    return roundoffs.get(reference.config.parallel.gradient_dtype, 0.0) if reference.config.train.ranks > 1 else 0.0
