"""Recheck the rows that a check left out, if the check shows an error end to end but not its stage.

A check examines the stages of two sequences of a micro-batch, with uneven loss weights, and compares the step itself
end to end. Some faults depend on other rows (an index overflow in the middle, a tile, a sequence without padding), or
on the step's own weights. Such a fault is found end to end and has no origin. Then the step's state is loaded again.
The loss weight is moved to other sequences, two at a time, then to whole micro-batches with their own weights, until a
stage is wrong from its own inputs.

A step's gradients may also differ from the sum over its micro-batches because an operation is wrong for small numbers
alone: gradients of a whole step are smaller than those of its parts. Then a micro-batch with such gradients is
examined, and with smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from lockstep.core.backend import Batch, NotSupported, Session
from lockstep.core.capabilities import Loads, ask, ranks_of
from lockstep.core.config.schema import RunConfig
from lockstep.core.parity.evidence.evidence import Evidence
from lockstep.core.parity.evidence.loss_weights import weighted_rows
from lockstep.core.parity.evidence.probe import is_text_of, probe_batch, probe_of
from lockstep.core.parity.evidence.taps import look
from lockstep.core.parity.judge import local
from lockstep.core.parity.judge.judge import in_order
from lockstep.core.parity.judge.own_step import OWN
from lockstep.core.parity.measures.compare import Reference
from lockstep.core.parity.measures.verdict import Check, Finding
from lockstep.core.parity.reference.stages import is_forward
from lockstep.core.plan.checks import LOOKED_AT, taps_bytes
from lockstep.core.train.loss_scale import SCALE

# A judge of evidence on other sequences, which returns the evidence to keep and the stages that are wrong.
Judged = Callable[[Evidence], tuple[Evidence, list[Finding]]]
# The taps of a whole micro-batch are read if they have fewer bytes than this.
MOST_SHOWN = 2e9
# If a sum is wrong, gradients are examined that are so many times smaller than those of the step.
SMALLER = (1, 64)


@np.errstate(invalid="ignore", over="ignore")
def recheck_rows(
    session: Session, config: RunConfig, evidence: Evidence, check: Check, reference: Reference
) -> tuple[Evidence, Check]:
    """Repeat an end-to-end origin on the step's other sequences. Returns the evidence and the check with the result.

    The session must have the state `evidence.after`, and has it again afterwards. If this is not possible, both are
    returned unchanged.
    """
    one_step = replace(reference, over_steps=None)
    return rechecked(session, config, evidence, check, lambda seen: (seen, _broken(seen, one_step)))


def rechecked(
    session: Session, config: RunConfig, evidence: Evidence, check: Check, judged: Judged, most: int | None = None
) -> tuple[Evidence, Check]:
    """Recheck rows as `recheck_rows` does, with `judged` as the judge, called on rank 0.

    most: largest number of micro-batches to examine; None for no limit.
    The session has the state `evidence.after` afterwards.
    """
    if not is_unnamed(check, evidence):
        return evidence, check
    try:
        load = ask(session, Loads).load
    except NotSupported:
        return evidence, check
    ranks = ranks_of(session)
    try:
        load(evidence.before)
        alone = all(OWN in found.note for found in check.findings if not found.ok)
        others = _others(evidence, config, own_first=alone and most is not None)
        if check.origin is not None and _is_sum(check.origin):
            others = _of_small_gradients(evidence, config)
        for tapped, note in islice(others, most):
            taps = look(session, config, tapped, [])
            # The scores of the evidence belong to the other sequences.
            seen = replace(evidence, tapped=tapped, taps=taps, evaluated={}, rechecked=True)
            seen = replace(seen, probed=session.gradients(tapped))
            found = [(seen, list[Finding]())]

            def judge_it(seen: Evidence = seen, found: list[tuple[Evidence, list[Finding]]] = found) -> list[Finding]:
                found[0] = judged(seen)
                return found[0][1]

            if broken := ranks.of_first(judge_it):
                return found[0][0], replace(check, findings=in_order([*check.findings, *_noted(broken, note)]))
    except NotSupported:
        pass
    finally:
        load(evidence.after)
    return evidence, check


def is_unnamed(check: Check, evidence: Evidence) -> bool:
    """Return whether a check shows an error of the model end to end or in a sum, and no stage that could be shown."""
    origin = check.origin
    if check.verdict != "disagreed" or origin is None or not evidence.taps:
        return False
    of_model = is_forward(origin.stage) or origin.stage == "gradients"
    return _is_sum(origin) or (of_model and origin.scope == "end_to_end")


def _is_sum(origin: Finding) -> bool:
    """Return whether the first wrong link is the sum over the step's micro-batches."""
    return origin.stage == "accumulation"


def broken_stages(findings: Iterable[Finding]) -> list[Finding]:
    """Return the stages of the model that are wrong from their own inputs."""
    return [one for one in findings if not one.ok and one.scope == "local" and is_forward(one.stage)]


def _broken(seen: Evidence, one_step: Reference) -> list[Finding]:
    return [found for found in local.stages(seen, one_step, []) if not found.ok]


def _noted(broken: list[Finding], note: str) -> list[Finding]:
    return [replace(found, note="; ".join(n for n in (found.note, note) if n)) for found in broken]


def _others(evidence: Evidence, config: RunConfig, own_first: bool) -> Iterator[tuple[Batch, str]]:
    """Yield the micro-batches to recheck, each with a note that describes it.

    First the other sequences of the examined micro-batch, two at a time, because they locate the sequence. Then whole
    micro-batches with the step's own weights. Then pairs of sequences of the other micro-batches.
    own_first: start with the whole micro-batches.
    """
    whole = [(micro, OWN) for micro in _whole(evidence, config)]
    pairs = ((pair, f"on sequences {_rows(pair)} of the micro-batch") for pair in _pairs(evidence, config))
    if own_first:
        yield from whole
    of_examined = len(evidence.tapped.tokens)
    yield from islice(pairs, max(0, of_examined - 1) // 2)
    if not own_first:
        yield from whole
    yield from pairs


def _rows(batch: Batch) -> str:
    return ", ".join(map(str, weighted_rows(batch)))


def _whole(evidence: Evidence, config: RunConfig) -> Iterator[Batch]:
    """Yield the step's whole micro-batches if their taps take little more memory than those of two sequences."""
    for micro in evidence.batch.cut(config.train):
        if taps_bytes(config, len(micro.tokens)) <= max(MOST_SHOWN, taps_bytes(config, LOOKED_AT)):
            yield micro


def _of_small_gradients(evidence: Evidence, config: RunConfig) -> Iterator[tuple[Batch, str]]:
    """Yield the step's first whole micro-batch with loss weights that make its gradients as small as in the step.

    One token has the weight of all that is left out, and is not compared (`Evidence.outweighs`). It is the first of its
    sequence, whose gradient does not reach other tokens. Under a loss scale it would overflow.
    """
    if SCALE in evidence.before.scalars:
        return
    total = float(evidence.batch.weights.sum(dtype=np.float64))
    for micro in islice(_whole(evidence, config), 1):
        for times in SMALLER if micro.weights.any() else ():
            weights = micro.weights.copy()
            weights.flat[np.flatnonzero(weights)[0]] += times * total - weights.sum(dtype=np.float64)
            how = "as small as in the step" if times == 1 else f"{times} times smaller than in the step"
            yield replace(micro, weights=weights), f"with gradients {how}"


def _pairs(evidence: Evidence, config: RunConfig) -> Iterator[Batch]:
    """Yield pairs of sequences that were not examined: first in the examined micro-batch, then in the others.

    An odd sequence is paired with the one before it, because the reference's programs take two sequences.
    """
    size = len(evidence.tapped.tokens)
    seen = set(weighted_rows(evidence.tapped).tolist())
    for micro in evidence.batch.micro_batches(size):
        of_seen = is_text_of(evidence.tapped, micro)
        rest = [row for row in range(size) if not of_seen or row not in seen]
        if config.precision.couples_sequences and rest:
            yield probe_of(micro, config)
            continue
        for start in range(0, len(rest), 2):
            pair = rest[start : start + 2] if start + 1 < len(rest) else rest[max(0, start - 1) :]
            yield probe_batch(micro, config.seed, pair)
