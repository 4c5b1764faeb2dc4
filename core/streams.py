"""Streams of a session's tensors, one at a time: collected into what a plain method gives, or made of it.

A session that streams (core/capabilities.py) has no two tensors on their way at once. One that does not gives all of
them, and they are handed over one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from lockstep.core.backend import Arrays, Batch, Gradients, NotSupported, Session, State, StepRecord
from lockstep.core.capabilities import (
    ShowsStepGradients,
    StreamsGradients,
    StreamsState,
    StreamsStepGradients,
    StreamsTaps,
    Take,
    ask,
    ask_stream,
)
from lockstep.core.checkpoint.format import PARAMS

GRADS, PROGRAM, TAPS = "grads", "program", "taps"
StreamStep = Callable[[Batch, Take, bool], tuple[StepRecord, Gradients | None]]


class Collected:
    """A collector of tensors that are handed over: kinds → names → arrays."""

    def __init__(self) -> None:
        self.kinds: dict[str, dict[str, np.ndarray]] = {}

    def __call__(self, kind: str, name: str, array: np.ndarray) -> None:
        """Keep a tensor."""
        self.kinds.setdefault(kind, {})[name] = array

    def arrays(self, kind: str) -> Arrays:
        """Return the tensors of a kind."""
        return self.kinds.get(kind, {})

    def state(self, found: State) -> State:
        """Return a state that came without its tensors, with them."""
        return with_tensors(found, self.arrays)

    def gradients(self, found: Gradients) -> Gradients:
        """Return gradients that came without their tensors, with them."""
        return replace(found, grads=self.arrays(GRADS), program=self.arrays(PROGRAM))


def with_tensors(found: State, arrays: Callable[[str], Arrays]) -> State:
    """Return a state with the tensors of each of its kinds."""
    return replace(found, params=arrays(PARAMS), optimizer={kind: arrays(kind) for kind in found.optimizer})


def stream_state(session: Session, take: Take) -> State:
    """Hand the tensors of a session's state to `take`; return it without them."""
    with suppress(NotSupported):
        return ask_stream(session, StreamsState, "state").stream_state(take)
    found = session.state()
    kinds = {PARAMS: found.params, **found.optimizer}
    found = replace(found, params={}, optimizer={kind: {} for kind in found.optimizer})
    for kind in list(kinds):
        _hand_over(kind, kinds.pop(kind), take)
    return found


def stream_gradients(session: Session, batch: Batch, take: Take) -> Gradients:
    """Hand the gradients of a batch to `take`; return NLL and loss. Raises what the session raises."""
    try:
        streams = ask_stream(session, StreamsGradients, "gradients")
    except NotSupported:
        return _handed_over(session.gradients(batch), take)
    return streams.stream_gradients(batch, take)


def stream_taps(session: Session, batch: Batch, taps: Sequence[str], take: Take) -> None:
    """Hand taps and gradients of a micro-batch to `take`. Raises what the session raises."""
    try:
        streams = ask_stream(session, StreamsTaps, "observe")
    except NotSupported:
        _hand_over(TAPS, session.observe(batch, taps), take)
        return
    streams.stream_taps(batch, taps, take)


def step_stream(session: Session) -> StreamStep:
    """Return what makes a step and gives its gradients to `take`; a last argument requests norms.

    Raises NotSupported if the session's step does not show its gradients.
    """
    with suppress(NotSupported):
        streams = ask_stream(session, StreamsStepGradients, "step_and_gradients")
        return lambda batch, take, norms: streams.stream_step(batch, take, norms=norms)
    shows = ask(session, ShowsStepGradients)

    def step(batch: Batch, take: Take, norms: bool) -> tuple[StepRecord, Gradients | None]:
        record, found = shows.step_and_gradients(batch, norms=norms)
        return record, None if found is None else _handed_over(found, take)

    return step


def _handed_over(found: Gradients, take: Take) -> Gradients:
    if not isinstance(found, Gradients):  # None would pass for a candidate that has none, and be agreed with
        raise TypeError(f"gradients() gave {type(found).__name__}, not lockstep.core.backend.Gradients")
    kinds = {GRADS: found.grads, PROGRAM: found.program}
    found = replace(found, grads={}, program={})
    for kind in list(kinds):
        _hand_over(kind, kinds.pop(kind), take)
    return found


def _hand_over(kind: str, arrays: Mapping[str, np.ndarray], take: Take) -> None:
    """Hand each tensor over, and release it."""
    left = dict(arrays)
    del arrays
    while left:
        name = next(iter(left))
        take(kind, name, left.pop(name))
