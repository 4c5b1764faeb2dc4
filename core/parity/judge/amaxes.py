"""FP8's delayed scaling: what a step remembers of the largest magnitudes that it saw, and of those before it.

The scales themselves need no check of their own: the reference casts with those that follow from the state before the
step (core/train/fp8_amax.py), and a layer with another one rounds otherwise in each of its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.core.components.precision import FORMATS
from lockstep.core.parity.evidence.gather import Evidence
from lockstep.core.parity.judge.end_to_end import Repeated
from lockstep.core.parity.measures.compare import Reference, exact, finding
from lockstep.core.parity.measures.verdict import Finding, Measure
from lockstep.core.train.fp8_amax import CASTS, PREFIX, amaxes_after, key, layers

STAGE = "fp8_amax"
# Candidate and twin each have an error of the twin's size.
INDEPENDENT = 2.0


def amaxes(
    evidence: Evidence, reference: Reference, made: bool, repeated: Repeated | None, whole: bool
) -> Iterator[Finding]:
    """The history after the step against the one before it, the weights, and the twin's amaxes of the same text.

    made: whether the step moved anything. whole: whether the reference repeated the whole step; of one of its
    micro-batches, an amax of the step is no smaller than the micro-batch's.
    """
    names, config = layers(reference.config), reference.config
    if not names:
        return
    before, after = evidence.before.scalars, evidence.after.scalars
    seen = {name: tuple(after.get(key(name, cast, 0), np.nan) for cast in CASTS) for name in names}
    due = amaxes_after(config, before, seen) if made else {n: x for n, x in before.items() if n.startswith(PREFIX)}
    wrong = [name for name, value in due.items() if after.get(name) != value]
    basis = "each step's amaxes a step older, the oldest forgotten" if made else "a step left out is not remembered"
    yield exact(STAGE, "history", len(wrong), len(due), basis, ", ".join(wrong[:5]))
    yield from _around_load(evidence)
    if not made:
        return
    for name in names:
        weight = evidence.before.params[f"{name}.weight"]
        largest = np.float32(max(weight.max(), -weight.min()))
        differs = int(np.float32(seen[name][CASTS.index("weight")]) != largest)
        yield exact(STAGE, f"{name}.weight", differs, 1, f"the largest magnitude of its weight, {largest:.9g}")
    if repeated is not None and repeated.amaxes:
        for cast in ("input", "gradient"):
            yield from _against_twin(cast, {name: of[CASTS.index(cast)] for name, of in seen.items()}, repeated, whole)


def _around_load(evidence: Evidence) -> Iterator[Finding]:
    """After the step the session casts as it does when it has been given that state."""
    if len(evidence.around_load) < 2:
        return
    first, second = evidence.around_load
    differ = [name for name in first if not np.array_equal(first[name].sketch, second[name].sketch, equal_nan=True)]
    basis = "the gradients of a micro-batch after the step, and when the state after it is loaded: equal bits"
    yield exact(STAGE, "scales", len(differ), len(first), basis, ", ".join(differ[:3]))


def _against_twin(cast: str, seen: dict[str, float], repeated: Repeated, whole: bool) -> Iterator[Finding]:
    """One cast of every layer. An amax is one number: the twin's error is the largest of all layers."""
    at = CASTS.index(cast)
    twin, truth = ({name: float(of[side][at]) for name, of in repeated.amaxes.items()} for side in (0, 1))
    error = max(abs(twin[name] - truth[name]) / truth[name] for name in seen if truth[name])
    roundoff = FORMATS["bf16"].roundoff
    high = INDEPENDENT * max(error, roundoff)
    basis = f"twice the twin's largest error of all layers, {error:.1e}, or bf16's roundoff"
    for name, found in seen.items():
        apart = (found - twin[name]) / twin[name] if twin[name] else float(found != 0)
        value = abs(apart) if whole or not apart >= 0 else 0.0
        measure = Measure("relative_error", value if np.isfinite(value) else np.inf, None, high, basis)
        yield finding(STAGE, f"{name}/{cast}", "end_to_end", (measure,), 1)
