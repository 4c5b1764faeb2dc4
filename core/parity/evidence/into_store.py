"""Write the tensors of a session into a store, under a common name."""

from __future__ import annotations

from dataclasses import replace

from lockstep.core.backend import Arrays, Batch, Gradients, Session, State
from lockstep.core.capabilities import Take
from lockstep.core.parity.evidence.store import Store
from lockstep.core.streams import GRADS, PROGRAM, stream_gradients, stream_state, with_tensors


def state_into(store: Store, name: str, session: Session) -> State:
    """Return the session's state. Its tensors are in the store under NAME/KIND."""
    return with_tensors(stream_state(session, taking(store, name)), lambda kind: store.arrays(f"{name}/{kind}"))


def gradients_into(store: Store, name: str, session: Session, batch: Batch) -> Gradients:
    """Return NLL, loss and gradients of a batch, with the gradients in the store. Raises the session's errors."""
    return gradients_of(store, name, stream_gradients(session, batch, taking(store, name)))


def gradients_of(store: Store, name: str, found: Gradients) -> Gradients:
    """Return gradients that came without tensors, with the tensors that the store has under this name."""
    return replace(found, grads=store.arrays(f"{name}/{GRADS}"), program=store.arrays(f"{name}/{PROGRAM}"))


def taking(store: Store, name: str) -> Take:
    """Return a function that puts each tensor into the store under NAME/KIND."""
    return lambda kind, tensor, array: store.put(f"{name}/{kind}", tensor, array)


def put_all(store: Store, kind: str, arrays: Arrays) -> Arrays:
    """Put all tensors of a kind. Returns them as the store does."""
    for name, array in arrays.items():
        store.put(kind, name, array)
    return store.arrays(kind)
