"""Check the numbers that a step's record only reports and no other link reads.

Tokens and loss weight follow from the batch, counts from the state, and norms by group from weights and gradients,
which the check has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lockstep.core.arrays import part_of, shape_of
from lockstep.core.backend import Arrays
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.names import groups_of, parameter_shapes
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.judge.update import differing
from lockstep.core.parity.measures import scalar_bounds
from lockstep.core.parity.measures.compare import exact, finding
from lockstep.core.parity.measures.stretches import stretches
from lockstep.core.parity.measures.verdict import Finding, Measure
from lockstep.core.train.fp8_amax import without_amaxes
from lockstep.core.train.metrics import UPDATE_RATIO, has_norms, norms_by_group

STAGE = "record"


def reports(evidence: Evidence, config: RunConfig, missing: list[str]) -> Iterator[Finding]:
    """Compare tokens, loss weight, counts of the state, and norms by group if the record has them.

    missing: receives the norms that are not judged.
    """
    record, batch = evidence.record, evidence.batch
    yield exact(STAGE, "tokens", int(record.tokens != batch.targets.size), 1, "the number of targets in the batch")
    weight = math.fsum(batch.weights.ravel().tolist())
    bound, basis = scalar_bounds.sum_bound(batch.weights.size)
    apart = scalar_bounds.ulps(record.loss_weight, weight, np.dtype(np.float32))
    yield finding(STAGE, "loss_weight", "local", (Measure("ulp", apart, None, bound, f"Σ weight: {basis}"),), 1)
    counts = without_amaxes(evidence.after.scalars)
    for name in sorted(counts.keys() & record.metrics.keys()):
        basis = "equal, with the state after the step"
        yield exact(STAGE, name, int(not scalar_bounds.same(record.metrics[name], counts[name])), 1, basis)
    if has_norms(record.metrics):
        yield from _norms(evidence, config, missing)


def _norms(evidence: Evidence, config: RunConfig, missing: list[str]) -> Iterator[Finding]:
    """Compare norms by group with the FP64 norms of the candidate's own gradients, weights and updates."""
    before, after, metrics = evidence.before.params, evidence.after.params, evidence.record.metrics
    shapes = parameter_shapes(config.model)
    grads = evidence.stepped.grads if evidence.stepped else {}
    if differing(grads, shapes):
        missing.append("the record's gradient norms by group: the candidate does not show the step's gradients")
        grads = {}
    dtype = np.result_type(np.float32, *(part_of(before, name, slice(0, 1)).dtype for name in before))
    terms = max(map(math.prod, shapes.values())) + len(shapes)
    due = norms_by_group(groups_of(config.model), _norms_of(grads), _norms_of(before), _norms_of(after, before))
    if lacking := [name for name in due if name not in metrics]:
        missing.append(f"norms by group that the record lacks: {', '.join(lacking)}")
    for name in (name for name in due if name in metrics):
        held = scalar_bounds.update_ratio if name.startswith(UPDATE_RATIO) else scalar_bounds.norm_of_group
        yield finding(STAGE, name, "local", (held(metrics[name], due[name], terms, dtype),), 1)


def _norms_of(arrays: Arrays, less: Arrays | None = None) -> dict[str, float]:
    """Return the FP64 L2 norm of each array, or of its difference from the array of the same name in `less`."""
    found = {}
    for name in arrays:
        power = 0.0
        for where in stretches(math.prod(shape_of(arrays, name))):
            wide = part_of(arrays, name, where).astype(np.float64)
            if less is not None:
                wide -= part_of(less, name, where)
            power += float(wide @ wide)
        found[name] = math.sqrt(power)
    return found
