"""Write what a session hands over into a store, under a name for the whole of it."""

from __future__ import annotations

from dataclasses import replace

from lockstep.core.backend import Arrays, Batch, Gradients, Session, State
from lockstep.core.capabilities import Take
from lockstep.core.parity.evidence.store import Store
from lockstep.core.streams import GRADS, PROGRAM, stream_gradients, stream_state, with_tensors


def state_into(store: Store, name: str, session: Session) -> State:
    """Return the session's state, its tensors in the store under NAME/KIND."""
    return with_tensors(stream_state(session, taking(store, name)), lambda kind: store.arrays(f"{name}/{kind}"))


def gradients_into(store: Store, name: str, session: Session, batch: Batch) -> Gradients:
    """Return NLL, loss and gradients of a batch, the gradients in the store. Raises what the session raises."""
    return gradients_of(store, name, stream_gradients(session, batch, taking(store, name)))


def gradients_of(store: Store, name: str, found: Gradients) -> Gradients:
    """Return gradients that came without their tensors, with those that the store has under this name."""
    return replace(found, grads=store.arrays(f"{name}/{GRADS}"), program=store.arrays(f"{name}/{PROGRAM}"))


def taking(store: Store, name: str) -> Take:
    """Return what puts each tensor that it is given into the store, under NAME/KIND."""
    return lambda kind, tensor, array: store.put(f"{name}/{kind}", tensor, array)


def put_all(store: Store, kind: str, arrays: Arrays) -> Arrays:
    """Put all tensors of a kind; return them as the store gives them."""
    for name, array in arrays.items():
        store.put(kind, name, array)
    return store.arrays(kind)
