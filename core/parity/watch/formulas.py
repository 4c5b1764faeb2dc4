"""Formulas of another framework by the name of an ATen operation. The backends do not import each other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

log = logging.getLogger("lockstep.watch")

# A formula takes the arguments of the operation's schema, with arrays for tensors, and returns an array, or None, for
# each result.
Formula = Callable[..., Sequence[np.ndarray | None]]
Loader = Callable[[], Mapping[str, Formula]]

_loaders: list[Loader] = []


def offer(loader: Loader) -> None:
    """Register a loader of formulas. `formulas` calls it."""
    if loader not in _loaders:
        _loaders.append(loader)


def formulas() -> Mapping[str, Formula]:
    """Return the formulas of all loaders. A loader whose framework cannot be imported is left out."""
    found: dict[str, Formula] = {}
    for loader in _loaders:
        try:
            found |= loader()
        except ImportError as error:
            log.info("watch: operations are judged without formulas of another framework: %s", error)
    return found
