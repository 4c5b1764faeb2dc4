"""Request the taps and gradients of the sequences with loss weight."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lockstep.core.backend import Arrays, Batch, NotSupported, Session
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.names import GRADIENT, edge_names, parameter_shapes, tap_names
from lockstep.core.parity.evidence.loss_weights import weighted_tensor
from lockstep.core.parity.evidence.store import MemoryStore, Store
from lockstep.core.streams import TAPS, stream_taps


def observed_names(config: RunConfig) -> list[str]:
    """Return every name that a full check reads of a candidate's taps."""
    taps, parameters = tap_names(config.model), list(parameter_shapes(config.model))
    probed = (*taps, *edge_names(config.model), *parameters)
    return [*taps, *(GRADIENT + name for name in probed)]


def look(
    session: Session,
    config: RunConfig,
    tapped: Batch,
    missing: list[str],
    store: Store | None = None,
    note: Callable[[str, np.ndarray], None] = lambda name, tensor: None,
) -> Arrays:
    """Return taps and gradients of the sequences with weight, as far as the session shows them.

    missing: receives what it does not show.
    store: receives the tensors; by default a store in memory.
    note: called with name and tensor of each before it is stored.
    """
    into = MemoryStore() if store is None else store

    def take(kind: str, name: str, array: np.ndarray) -> None:
        tensor = weighted_tensor(name, array, tapped)
        note(name, tensor)
        into.put(kind, name, tensor)

    for asked, lost in (
        (observed_names(config), ""),
        (tap_names(config.model), "local checks of the backward stages"),
        ([], "local checks of the forward stages"),
    ):
        try:
            if asked:
                stream_taps(session, tapped, asked, take)
        except NotSupported as reason:
            why = str(reason)
            continue
        if lost:
            missing.append(f"{lost}: {why}")
        return into.arrays(TAPS)
    raise AssertionError("an empty request cannot be refused")
