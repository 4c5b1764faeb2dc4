"""Formulas of another framework by the name of an ATen operation, which no backend may import from the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

log = logging.getLogger("lockstep.watch")

# A formula: arguments as in the operation's schema, with arrays for tensors; it returns an array, or None, for each
# result.
Formula = Callable[..., Sequence[np.ndarray | None]]
Loader = Callable[[], Mapping[str, Formula]]

_loaders: list[Loader] = []


def offer(loader: Loader) -> None:
    """Register formulas; `loader` is called when the first operation is judged."""
    if loader not in _loaders:
        _loaders.append(loader)


def formulas() -> Mapping[str, Formula]:
    """Return all formulas on offer; none of a framework that cannot be imported."""
    found: dict[str, Formula] = {}
    for loader in _loaders:
        try:
            found |= loader()
        except ImportError as error:
            log.info("watch: operations are judged without formulas of another framework: %s", error)
    return found
