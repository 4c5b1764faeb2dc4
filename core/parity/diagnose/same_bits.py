"""Name the results that differ in any bit between two runs of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import numpy as np

from lockstep.core.arrays import bit_equal
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.judge.update import flat

# Fields of a step's record that do not follow from its arithmetic.
CLOCK = ("seconds", "tokens_per_second", "mfu", "metrics", "host", "sample")


def different(one: Evidence, other: Evidence) -> Iterator[str]:
    """Yield the names of all results that differ in any bit between two runs of a step, in the order of the chain."""
    first, second = dict(_everything(one)), dict(_everything(other))
    for name in [*first, *(n for n in second if n not in first)]:
        if name not in first or name not in second or not bit_equal(first[name], second[name]):
            yield name


def _everything(evidence: Evidence) -> Iterator[tuple[str, np.ndarray]]:
    for name, array in evidence.taps.items():
        yield name, array
    given = {"micro-batch": evidence.probed, "step": evidence.stepped}
    for name, found in given.items():
        if found is not None:
            yield f"nll of the {name}", found.nll
            yield f"loss of the {name}", np.asarray(found.loss)
            for parameter, grad in {**found.program, **found.grads}.items():
                yield f"gradient of the {name}: {parameter}", grad
    for what, sums in {"accumulation": evidence.accumulated, "reduction": evidence.reduced}.items():
        for i, part in enumerate((*sums.parts, sums.whole.grads) if sums else ()):
            for parameter, grad in part.items():
                yield f"{what} {i} {parameter}", grad
    for i, one in enumerate(evidence.own):
        for name, seen in one.items():
            yield f"{name} of micro-batch {i} of the step", seen.sketch
    for i, one in enumerate(evidence.reweighted):
        for name, seen in one.items():
            yield f"{name} of the step's first micro-batch with other weights {i}", seen.sketch
    for i, one in enumerate(evidence.around_load):
        for name, seen in one.items():
            yield f"{name} of the first micro-batch {'after' if i else 'before'} its state is loaded", seen.sketch
    passes = evidence.probed_amaxes, evidence.tapped_amaxes, evidence.step_amaxes, *evidence.own_amaxes
    for i, part in enumerate(passes):
        for name, array in part.items():
            yield f"amaxes of {name}, pass {i}", array
    for name, value in asdict(evidence.record).items():
        if name not in CLOCK:
            # As text, because `repr` distinguishes all numbers and a field may be None.
            yield f"record.{name}", np.asarray(repr(value))
    for later in evidence.later:
        for name, value in asdict(later).items():
            if name not in CLOCK:
                yield f"record.{name} as step {later.step}", np.asarray(repr(value))
    for moved in evidence.moved:
        for name, array in {**flat(moved.after), **moved.grads}.items():
            yield f"after step {moved.number}: {name}", array
    for name, array in flat(evidence.after).items():
        yield f"after the step: {name}", array
    if evidence.reloaded is not None:
        for name, array in flat(evidence.reloaded).items():
            yield f"reloaded: {name}", array
