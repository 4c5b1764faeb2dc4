"""What a candidate says of one step: gathered from its session, judged elsewhere and later.

Gathering never needs the reference and judging never needs the candidate, so the same evidence serves a check side by
side (`lockstep parity`) and one in a worker process (`lockstep train --parity.every N`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from core.backend import Arrays, Batch, Gradients, NotSupported, Session, State, StepRecord
from core.config import RunConfig
from core.names import tap_names

# A local check sees a fault in whatever it is fed: two sequences are enough, and keep what is handed over small.
TAPPED_SEQUENCES = 2


@dataclass(frozen=True)
class Evidence:
    """One step of a candidate.

    before, after: state around the step. batch: what the step was given.
    stepped:   the candidate's NLL, loss and gradients on that batch.
    probe:     the batch whose forward and backward pass the reference repeats (the step's own batch, or a smaller one).
    probed:    the candidate's NLL, loss and gradients on the probe.
    tapped:    the sequences on which `taps` were observed, and their values.
    not_covered: what the candidate could not do, in words. seconds: what gathering cost, without the step itself.
    """

    before: State
    after: State
    batch: Batch
    record: StepRecord
    stepped: Gradients | None
    probe: Batch
    probed: Gradients | None
    tapped: Batch
    taps: Arrays
    not_covered: tuple[str, ...]
    seconds: float


def gather(
    session: Session, config: RunConfig, batch: Batch, probe: Batch | None = None, norms: bool = False
) -> Evidence:
    """Run one step of `session` on `batch` and keep what a check needs. Without `probe`, the batch itself is probed.

    Raises whatever the session raises, except NotSupported from `gradients` and `observe`, which is listed as not
    covered.
    """
    started = time.perf_counter()
    missing: list[str] = []
    before = session.state()
    target = batch if probe is None else probe
    probed = stepped = None
    try:
        probed = _gradients(session, target)
        stepped = probed if probe is None else _gradients(session, batch)
    except NotSupported as reason:
        missing.append(f"gradients and per-token NLL: {reason}")
    tapped = first_sequences(target, TAPPED_SEQUENCES)
    taps: Arrays = {}
    try:
        taps = session.observe(tapped, tap_names(config.model))
    except NotSupported as reason:
        missing.append(f"local checks of the forward stages: {reason}")
    gathering = time.perf_counter() - started
    started = time.perf_counter()
    record = session.step(batch, norms=True) if norms else session.step(batch)
    record = replace(record, seconds=time.perf_counter() - started)
    return Evidence(
        before, session.state(), batch, record, stepped, target, probed, tapped, taps, tuple(missing), gathering
    )


def _gradients(session: Session, batch: Batch) -> Gradients:
    found = session.gradients(batch)
    if not isinstance(found, Gradients):  # None would pass for a candidate that has none, and be agreed with
        raise TypeError(f"gradients() gave {type(found).__name__}, not core.backend.Gradients")
    return found


def first_sequences(batch: Batch, count: int) -> Batch:
    """The first `count` sequences of a batch (all, if it has fewer)."""
    return Batch(batch.tokens[:count], batch.targets[:count], batch.weights[:count])


def uneven_weights(batch: Batch, seed: int) -> Batch:
    """The batch with loss weights that differ between sequences and between tokens.

    Sequence i keeps a share of its tokens that falls linearly from 1 to 1/4 over the batch (so micro-batches weigh
    differently and a mean of their means is not the mean), and kept tokens weigh 1 or 1/2 (so a weight that is taken
    for a mask shows). A function of the seed and the batch's shape alone.
    """
    rows, length = batch.tokens.shape
    draw = np.random.Generator(np.random.Philox(key=seed)).random((2, rows, length), dtype=np.float32)
    share = np.linspace(1.0, 0.25, rows, dtype=np.float32)[:, None]
    weights = np.where(draw[0] < share, np.where(draw[1] < 0.5, np.float32(1.0), np.float32(0.5)), np.float32(0.0))
    weights[:, 0] = 1.0
    return Batch(batch.tokens, batch.targets, weights)
