"""Judge the step as it runs: its own loss weights, all of its sequences, its own number of micro-batches.

The micro-batch whose stages are shown has uneven weights on a few sequences. A program may have a branch for weights
that are all 1, or be wrong in rows, or in a fourth micro-batch, that are not among those. So the step's own NLL and
gradients are compared with the reference end to end, and what it accumulated with the sum of its micro-batches.
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
# Clean FP32 runs, whose gradients of q and k cancel, reached 2e-6.
LEAST_APART = 1e-4
# Part of the note of each finding.
OWN = "the step with its own weights"


@dataclass(frozen=True)
class Shown:
    """The part of the step that the reference repeats.

    batch: of it. found: the candidate's observations of it. weight: what its loss is divided by, None for its own.
    """

    batch: Batch
    found: Observations
    weight: float | None = None


def shown(evidence: Evidence, reference: Reference, missing: list[str]) -> Shown | None:
    """Return the whole step in a thorough check, else one of its micro-batches; None where its gradients are hidden."""
    if evidence.stepped is None:
        return None
    number = part_repeated(evidence, reference.config)
    if number is None:
        return Shown(evidence.batch, end_to_end.observations(evidence.stepped, {}, reference.config.model))
    if not evidence.own:
        missing.append("the step's own gradients end to end: those of a single micro-batch are not known")
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
    """Return the number of the micro-batch that the reference repeats, drawn by the step's batch; None for all of them.

    A thorough check repeats all.
    """
    count = len(evidence.batch.cut(config.train))
    return None if evidence.thorough or count == 1 else int(evidence.batch.digest()[8:16], 16) % count


def findings(
    evidence: Evidence, reference: Reference, missing: list[str]
) -> tuple[list[Finding], Observations, Repeated | None]:
    """Compare the step end to end, and with its micro-batches. Return the candidate's observations and the others too.

    Nothing is compared where the reference gives no gradients.
    """
    part = shown(evidence, reference, missing)
    repeated = None
    found: list[Finding] = []
    if part is not None:
        try:
            repeated = end_to_end.repeat_alone(evidence.before, part.batch, reference, part.weight)
            # Means over checks include only the probe, which is always a batch of the same kind.
            found += end_to_end.compare_with(part.found, repeated, replace(reference, over_steps=None))
        except NotSupported as reason:
            missing.append(f"the step's own gradients end to end: {reason}")
    whole = part is not None and part.batch is evidence.batch
    of_amaxes = amaxes(evidence, reference, step_is_made(evidence, reference), repeated, whole)
    found += _accumulated(evidence, reference, repeated, missing)
    found += _under_other_weights(evidence, reference)
    named = [replace(one, note="; ".join(note for note in (one.note, OWN) if note)) for one in found]
    return [*named, *of_amaxes], {} if part is None else part.found, repeated


def _accumulated(
    evidence: Evidence, reference: Reference, repeated: Repeated | None, missing: list[str]
) -> Iterator[Finding]:
    """Compare the step's gradients with the sum of what its micro-batches add, from sketches.

    A micro-batch that was computed apart adds its share of the loss weight. Over several ranks the sum has been reduced
    too, and is called so.
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
        missing.append(f"{stage} of the step's micro-batches: how far honest ones may be apart is not known")
        return
    if len(shares) != len(evidence.own):
        yield exact(stage, "micro-batches", abs(len(shares) - len(evidence.own)), len(shares), "one part each")
        return
    # Only rounding errors, which differ when a micro-batch runs alone.
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
            continue  # a sum of non-finite parts only inherits them
        if not evidence.own_in_step and SCALE in evidence.before.scalars and any(part.nonfinite for part in there):
            # Alone, a micro-batch of little weight has larger gradients than its share in the step suggests.
            missing.append(f"{stage} at {name}: a micro-batch by itself overflows at this loss scale")
            continue
        yield _sum(stage, name, whole, there, shares, reference, repeated if rounds else None)


def _under_other_weights(evidence: Evidence, reference: Reference) -> Iterator[Finding]:
    """Compare the candidate under the step's own weights with itself under others, where its program repeats bits.

    The NLL of a token does not depend on weights: it has the bits of the same token in `tapped`. The gradients of
    `reweighted_batches` are those of the own weights, but for some roundings. Without a reference between them, both
    may differ by far less than the rounding error. The nearest of them counts: in one, a single rounding that falls
    otherwise in a token that outweighs the others can be followed by all of that token's (a clean run reached four
    times the bound); a fault is in all of them.
    """
    config = reference.config
    if evidence.stepped is None or not evidence.taps_keep_bits or config.device == "cuda":
        return
    of_step = nll_of_tapped(evidence, config)
    if of_step is not None and evidence.probed is not None and of_step.nll.shape == evidence.probed.nll.shape:
        # Where the probe has an end of text of its own, its tokens differ.
        same = evidence.tapped.targets == of_step.batch.targets
        same &= evidence.tapped.tokens == of_step.batch.tokens
        own, nll = of_step.nll[same], evidence.probed.nll[same]
        unequal = float(np.mean((own != nll) & ~(np.isnan(own) & np.isnan(nll))))
        measure = Measure("unequal", unequal, None, 0.0, "a token's NLL does not depend on loss weights")
        yield finding("nll", "nll", "end_to_end", (measure,), own.size, unequal, phase="forward")
    first = evidence.own[0] if evidence.own else None
    most = max(LEAST_APART, _some_roundings(evidence, config))
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
        apart = min((_apart(theirs, one, most) for one in alike), key=lambda measure: measure.value)
        yield finding("gradients", parameter, "end_to_end", (apart,), theirs.size, phase="backward")


class OfStep(NamedTuple):
    """A micro-batch of the step as the step ran it, and its NLL (B, S)."""

    batch: Batch
    nll: np.ndarray


def nll_of_tapped(evidence: Evidence, config: RunConfig) -> OfStep | None:
    """Return the step's micro-batch from which the tapped one was made, with the NLL that the step gave it.

    None where the step shows no NLL, or has no such text.
    """
    micros = evidence.batch.cut(config.train)
    number = next((i for i, one in enumerate(micros) if is_text_of(evidence.tapped, one)), None)
    if number is None or evidence.stepped is None:
        return None
    rows = len(micros[number].tokens)
    nll = evidence.stepped.nll[number * rows : (number + 1) * rows]
    return OfStep(micros[number], nll) if nll.shape == micros[number].weights.shape else None


def _some_roundings(evidence: Evidence, config: RunConfig) -> float:
    """Return the most by which two gradients may differ if a few elements are rounded otherwise."""
    if SCALE in evidence.before.scalars:
        # A format that needs a loss scale has fewer bits for small numbers.
        return FORMATS["bf16"].roundoff
    return FORMATS[config.precision.operand].roundoff / ROUNDINGS


def _apart(one: Observation, other: Observation, most: float) -> Measure:
    """Measure the relative distance of two gradients."""
    apart = one.sketch.astype(np.float64) - other.sketch.astype(np.float64)
    length = float(np.linalg.norm(one.sketch.astype(np.float64)))
    distance = float(np.linalg.norm(apart)) / length if length else float(np.linalg.norm(apart))
    basis = "the same gradient with loss weights twice as large, one by an ulp less: a fraction of a roundoff"
    return Measure("relative_error", distance, None, most, basis)


def _rounds_otherwise(shares: list[float], scale: float) -> bool:
    """Return whether a micro-batch by itself is rounded otherwise than in the step.

    A share that is a power of two scales every number without a rounding, but for FP16, which ends at both sides.
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

    Allowed: a few ulp of the norm; √A of them for A additions, and √(n / K) for a sketch of n numbers, whose K sums
    have n / K terms each (Higham & Mary 2019, theorem 2.4, to the first order); more where parts cancel. Where parts
    are rounded otherwise than in the step, the distance of two results with independent errors of the twin's size too.
    """
    if any(part.size != whole.size for part in parts):
        return exact(stage, name, 1, whole.size, "sizes must be equal")
    # A micro-batch without any weight has no mean, and adds nothing.
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
        basis += f", and {margin:.2g}·√2 of the twin's error {error:.1e}: a part by itself is rounded otherwise"
    if (narrow := _narrow(reference)) and size:
        high += reference.config.train.ranks * narrow * sum(float(np.linalg.norm(one)) for one in sketches) / size
        basis += f", and {reference.config.train.ranks} roundings of {narrow:.1e}"
    relative = apart / size if size else (math.inf if apart else 0.0)
    if not math.isfinite(apart):
        relative = math.inf
    measure = Measure("relative_difference", relative, None, high, basis)
    return finding(stage, name, "local", (measure,), whole.size)


def _honest_error(name: str, reference: Reference, repeated: Repeated) -> tuple[float, float]:
    """Return the twin's relative error in a gradient, and the margin on it: both sides are one program's."""
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
    """Return the unit roundoff of the format in which ranks sum their gradients; 0 for that of the gradients."""
    roundoffs: Mapping[str, float] = {"bf16": 2.0**-8, "fp16": 2.0**-11}
    return roundoffs.get(reference.config.parallel.gradient_dtype, 0.0) if reference.config.train.ranks > 1 else 0.0
