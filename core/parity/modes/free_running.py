"""Measure divergence without a verdict: candidate, twin and truth train separately from the same initial weights.

Nothing is synchronised, so rounding errors grow through the weights, and the distance between two correct trajectories
grows as well. But an honest candidate does not leave the truth faster than its twin does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np

from lockstep.core.backend import Arrays, Backend, Batch, State, StepRecord
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.measures.compare import Reference
from lockstep.core.parity.reference.self_check import sound_reference


@dataclass(frozen=True)
class Drift:
    """The distances between the trajectories after a step.

    loss_candidate, loss_twin, loss_truth: losses of the step.
    candidate_from_truth, twin_from_truth, candidate_from_twin: relative L2 distances over all weights.
    """

    step: int
    loss_candidate: float
    loss_twin: float
    loss_truth: float
    candidate_from_truth: float
    twin_from_truth: float
    candidate_from_twin: float

    @property
    def excess(self) -> float:
        """Ratio of the candidate's distance from the truth to the twin's: near 1 for an honest candidate."""
        if self.twin_from_truth:
            return self.candidate_from_truth / self.twin_from_truth
        return 1.0 if self.candidate_from_truth == 0 else math.inf


def drift(candidate: Backend, reference: Backend, config: RunConfig, batches: Iterable[Batch]) -> Iterator[Drift]:
    """Run all three sessions on the same batches, with uneven loss weights. Yields a `Drift` for each step.

    All start from the *candidate's* initial state, so that only the steps cause differences.
    """
    with ExitStack() as stack:
        session = candidate.open(config)
        stack.callback(session.close)
        references = sound_reference(reference, config)
        stack.callback(references.close)
        initial = session.state()
        references.ranks.of_first(partial(_begin, initial, references))
        for number, batch in enumerate(batches):
            weighted = uneven_weights(batch, config.seed + number)
            record = session.step(weighted)
            c = session.state().params
            yield references.ranks.of_first(partial(_drifted, record, c, weighted, references))


def _begin(initial: State, references: Reference) -> None:
    for other in references.sessions:
        other.load(initial)


def _drifted(record: StepRecord, c: Arrays, weighted: Batch, references: Reference) -> Drift:
    """Run the reference's step and measure the distances. c: the candidate's weights after its step."""
    others = [other.step(weighted) for other in references.sessions]
    states = [other.state().params for other in references.sessions]
    w, t = states[0], states[-1]
    return Drift(
        record.step,
        record.loss,
        others[0].loss,
        others[-1].loss,
        _apart(c, t),
        _apart(w, t),
        _apart(c, w),
    )


def _apart(one: Arrays, other: Arrays) -> float:
    """Return ‖one − other‖ / ‖other‖ over all weights."""
    power = sum(float(np.square(one[n].astype(np.float64) - other[n]).sum()) for n in other)
    return math.sqrt(power / sum(float(np.square(other[n], dtype=np.float64).sum()) for n in other))
