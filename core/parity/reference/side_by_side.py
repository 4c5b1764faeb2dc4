"""Run twin and truth on one batch together, so that each array is compared as soon as both have computed it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from lockstep.core.backend import Batch, NotSupported, Session, State
from lockstep.core.capabilities import RunsStages, ask
from lockstep.core.parity.evidence.observations import PARAMETER, PROBE_NLL
from lockstep.core.parity.measures.compare import Reference
from lockstep.core.parity.reference.chain import Chain, Named
from lockstep.core.train.fp8_amax import PREFIX, amaxes_in_force
from lockstep.core.train.loss_scale import SCALE


@dataclass(frozen=True)
class Made:
    """An array of twin and truth, in their stream dtypes. name: as from `Chain.run`."""

    name: str
    twin: np.ndarray
    truth: np.ndarray


def passes(
    reference: Reference, state: State, batch: Batch, names: Collection[str], weight: float | None = None
) -> Iterator[Made]:
    """Yield the requested arrays of one batch at a state, in the order and with the names of `Chain.run`.

    weight: divisor of the loss Σ weight·nll; by default the batch's own Σ weight.
    A reference that does not run single stages loads the state and computes all arrays at once. Gradients then come
    before taps. Raises NotSupported if it cannot do this either.
    """
    if reference.config.parity.reference_devices == 1:
        begun = _begun(_chains(reference, state, batch, names, weight))
        if begun is not None:
            yield from begun
            return
    yield from _together([_at_once(session, state, batch, names, weight) for session in reference.sessions])


def _begun(made: Iterator[Made]) -> Iterator[Made] | None:
    """Run the head's passes, and return the same iterator; None if the reference cannot run the chain."""
    try:
        return itertools.chain([next(made)], made)
    except StopIteration:
        return iter(())
    except NotSupported:
        return None


def _chains(
    reference: Reference, state: State, batch: Batch, names: Collection[str], weight: float | None
) -> Iterator[Made]:
    config, scale = reference.config, state.scalars.get(SCALE, 1.0)
    narrow, amaxes = config.parallel.gradient_dtype != "fp32", amaxes_in_force(config, state.scalars)
    sides = [ask(session, RunsStages) for session in reference.sessions]
    chains = [
        Chain(
            sides[0],
            config,
            state.params,
            reference.stream,
            fp8=True,
            casts=True,
            scale=scale,
            ranks=config.train.ranks if narrow else 1,
            amaxes=amaxes,
        ),
        # FP64 has no FP8, so the truth runs the plain stages.
        *(Chain(side, config, state.params, np.float64, scale=scale, amaxes=amaxes) for side in sides[1:]),
    ]
    yield from _together([one.run(batch, names, weight) for one in chains])


def _together(sides: list[Named]) -> Iterator[Made]:
    for made in zip(*sides, strict=True):
        (name, twin), (_, truth) = made[0], made[-1]
        yield Made(name, twin, truth)


def _at_once(session: Session, state: State, batch: Batch, names: Collection[str], weight: float | None) -> Named:
    session.load(state)
    share = 1.0 if weight is None else float(batch.weights.sum(dtype=np.float64)) / weight
    names = [name for name in names if not name.startswith(PREFIX)]
    taps = [name for name in names if name != PROBE_NLL and not name.startswith(PARAMETER)]
    if len(taps) < len(names):
        found = session.gradients(batch)
        if PROBE_NLL in names:
            yield PROBE_NLL, found.nll
        for name in names:
            if name.startswith(PARAMETER):
                gradient = found.grads[name.removeprefix(PARAMETER)]
                yield name, gradient if share == 1 else gradient * gradient.dtype.type(share)
        del found
    if taps:
        seen = session.observe(batch, taps)
        yield from ((name, seen[name]) for name in taps if name in seen)
