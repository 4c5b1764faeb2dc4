"""Check FP8's amax history: the largest magnitudes in a step, and those of the steps before it.

The scales need no separate check. The reference casts with the scales that follow from the state before the step
(core/train/fp8_amax.py), and a layer with another scale rounds all of its numbers differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lockstep.core.components.precision import FORMATS, narrowed
from lockstep.core.model.names import GRADIENT
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.judge.end_to_end import Repeated
from lockstep.core.parity.measures.compare import Reference, exact, finding
from lockstep.core.parity.measures.verdict import Finding, Measure
from lockstep.core.parity.reference.stages import stages_of
from lockstep.core.train.fp8_amax import CASTS, PREFIX, amaxes_after, first_amaxes, key, largest, layers

STAGE = "fp8_amax"
# The candidate and the twin each have an error of the size of the twin's.
INDEPENDENT = 2.0
# With the scales of another state, a gradient changes by roundings of FP8. With the same scales it changes only by the
# order of summation on a GPU.
LEAST_APART = 1e-4


def amaxes(
    evidence: Evidence, reference: Reference, made: bool, repeated: Repeated | None, whole: bool
) -> Iterator[Finding]:
    """Compare the amax history after the step with the history before it, the weights, and the twin's amaxes.

    made: whether the step changed the weights.
    repeated: results of the reference, None if it computed nothing.
    whole: whether the reference repeated the whole step. If it repeated only one micro-batch, an amax of the step may
    be larger than the micro-batch's.
    """
    names, config = layers(reference.config), reference.config
    if not names:
        return
    # The history of a candidate without one starts with the first amaxes.
    before, after = first_amaxes(config) | dict(evidence.before.scalars), evidence.after.scalars
    seen = {name: tuple(after.get(key(name, cast, 0), np.nan) for cast in CASTS) for name in names}
    due = amaxes_after(config, before, seen) if made else {n: x for n, x in before.items() if n.startswith(PREFIX)}
    wrong = [name for name, value in due.items() if after.get(name) != value]
    basis = "amaxes move by one place, the oldest is dropped" if made else "a skipped step leaves the history"
    yield exact(STAGE, "history", len(wrong), len(due), basis, ", ".join(wrong[:5]))
    yield from _around_load(evidence)
    yield from _of_tensors(evidence, reference, repeated)
    if not made:
        return
    yield from _of_step(evidence, seen)
    yield from _of_micro_batches(evidence, reference, seen)
    for name in names:
        due_of_weight = float(largest(evidence.before.params[f"{name}.weight"]))
        found = seen[name][CASTS.index("weight")]
        yield _apart(f"weight/{name}", found, due_of_weight, 0.0, "the largest magnitude of its weight")
    if repeated is not None and repeated.amaxes:
        for cast in ("input", "gradient"):
            yield from _against_twin(cast, {name: of[CASTS.index(cast)] for name, of in seen.items()}, repeated, whole)


def _around_load(evidence: Evidence) -> Iterator[Finding]:
    """Compare the casts of the session after the step with its casts after loading the same state."""
    if len(evidence.around_load) < 2:
        return
    first, second = ({name: one.sketch.astype(float) for name, one in of.items()} for of in evidence.around_load)
    apart = max(
        float(np.linalg.norm(second.get(n, np.inf) - x)) / (float(np.linalg.norm(x)) or 1.0) for n, x in first.items()
    )
    basis = "gradients of a micro-batch right after the step, and after loading its state"
    measure = Measure("relative_error", apart, None, LEAST_APART, basis)
    yield finding(STAGE, "scales", "local", (measure,), len(first))


def _of_tensors(evidence: Evidence, reference: Reference, repeated: Repeated | None) -> Iterator[Finding]:
    """Compare amaxes of the tapped program and of the training program with the tapped micro-batch's tensors.

    The tapped program's amaxes are those of its tensors, except that a compiler may leave out the rounding to bf16. If
    the training program has not the same bits, each of the two programs may be as far from the truth as the twin is.
    The twin's distance is unknown if the reference repeated nothing.
    """
    taps, config = evidence.taps, reference.config
    eager = not config.compile.enabled
    same_bits = evidence.taps_keep_bits and eager and config.device != "cuda"
    basis = "the largest magnitude of the tensor that it casts"
    for stage in stages_of(config):
        needed = stage.reads.get("x", ""), GRADIENT + stage.tap
        if stage.module is None or any(name not in taps for name in needed):
            continue
        cast = taps[needed[0]], evidence.before.params[stage.params["weight"]], taps[needed[1]]
        due = np.array([largest(x) for x in cast], dtype=np.float32)
        due[[0, 2]] = narrowed(due[[0, 2]], config.precision.operand)
        shown = evidence.tapped_amaxes.get(stage.module)
        for name, value, of in zip(CASTS, () if shown is None else shown, due, strict=False):
            most = 0.0 if eager or name == "weight" else 2 * FORMATS["bf16"].roundoff
            yield _apart(f"{name} of the tapped micro-batch/{stage.module}", float(value), float(of), most, basis)
        found = evidence.probed_amaxes.get(stage.module)
        for name, value, of in zip(CASTS, () if found is None else found, due, strict=False):
            if same_bits or name == "weight":
                most = 0.0
            elif repeated is not None and repeated.amaxes:
                most = _both_errors(name, repeated)
            else:
                continue
            yield _apart(f"{name} of a micro-batch/{stage.module}", float(value), float(of), most, basis)


def _of_step(evidence: Evidence, seen: dict[str, tuple[float, ...]]) -> Iterator[Finding]:
    """Compare the newest entries of the history with the amaxes of the step's passes, if the session reports them."""
    for name, noted in seen.items() if evidence.step_amaxes else ():
        told = [float(x) for x in evidence.step_amaxes.get(name, [np.nan] * len(CASTS))]
        wrong = [cast for cast, one, other in zip(CASTS, noted, told, strict=True) if one != other]
        basis = "the history holds the amaxes of the step's passes"
        yield exact(STAGE, f"remembered/{name}", len(wrong), len(CASTS), basis, ", ".join(wrong))


def _of_micro_batches(
    evidence: Evidence, reference: Reference, seen: dict[str, tuple[float, ...]]
) -> Iterator[Finding]:
    """Compare a step's amaxes of inputs and gradients with the maximum over its micro-batches.

    The micro-batches ran inside the step or separately. A separate micro-batch has larger gradients, by the inverse of
    its share of the loss weight. These gradients have the same rounding if the share is a power of two and equal for
    all.
    """
    parts, config = evidence.own_amaxes, reference.config
    micros = evidence.batch.cut(config.train)
    if len(parts) < len(micros):
        return
    in_step = evidence.own_in_step
    share, weights = 1 / len(micros), {float(micro.weights.sum(dtype=np.float64)) for micro in micros}
    alike = in_step or (len(weights) == 1 and math.frexp(share)[0] == 0.5)
    share = 1.0 if in_step else share
    basis = f"the largest of the step's micro-batches, {'inside the step' if in_step else 'computed separately'}"
    most = 0.0 if in_step or config.device != "cuda" else 2 * FORMATS["bf16"].roundoff
    for cast, factor in {"input": 1.0, **({"gradient": share} if alike else {})}.items():
        at = CASTS.index(cast)
        for name, of_step in seen.items():
            due = factor * max(float(part[name][at]) for part in parts)
            yield _apart(f"{cast} of all micro-batches/{name}", of_step[at], due, most, basis)


def _apart(tap: str, found: float, due: float, most: float, basis: str) -> Finding:
    apart = abs(found - due) / due if due else float(found != 0)
    measure = Measure("relative_error", apart if np.isfinite(apart) else np.inf, None, most, f"{basis}, {due:.9g}")
    return finding(STAGE, tap, "local", (measure,), 1)


def _against_twin(cast: str, seen: dict[str, float], repeated: Repeated, whole: bool) -> Iterator[Finding]:
    """Compare one cast in every layer.

    An amax is a single number, so the twin's error is its maximum over all layers.
    """
    at, high = CASTS.index(cast), _both_errors(cast, repeated)
    basis = "twice the twin's largest error of all layers, or bf16's roundoff"
    for name, found in seen.items():
        twin = float(repeated.amaxes[name][0][at])
        apart = (found - twin) / twin if twin else float(found != 0)
        value = abs(apart) if whole or not apart >= 0 else 0.0
        measure = Measure("relative_error", value if np.isfinite(value) else np.inf, None, high, basis)
        yield finding(STAGE, f"{cast}/{name}", "end_to_end", (measure,), 1)


def _both_errors(cast: str, repeated: Repeated) -> float:
    """Return the largest relative difference of two honest amaxes of one cast, in any layer."""
    at = CASTS.index(cast)
    sides = [(float(twin[at]), float(truth[at])) for twin, truth in repeated.amaxes.values()]
    error = max((abs(twin - truth) / truth for twin, truth in sides if truth), default=0.0)
    return INDEPENDENT * max(error, FORMATS["bf16"].roundoff)
