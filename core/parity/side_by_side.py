"""Candidate and reference step by step: every step judged from the candidate's own state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from core.backend import Backend, Batch
from core.config import RunConfig
from core.parity.evidence import gather, uneven_weights
from core.parity.judge import Reference, judge
from core.parity.verdict import Check


def check_steps(candidate: Backend, reference: Backend, config: RunConfig, batches: Iterable[Batch]) -> Iterator[Check]:
    """A check of each of the candidate's first steps, on these batches with uneven loss weights.

    State-synchronised: before each judgement the reference takes the candidate's state, so every check judges one step.
    """
    session = candidate.open(config)
    references = Reference.open(reference, config)
    try:
        for number, batch in enumerate(batches):
            yield judge(gather(session, config, uneven_weights(batch, config.seed + number)), references)
    finally:
        session.close()
        references.close()
