"""Windows of a model: some of its blocks at a time, so that a program of the whole model shows no more than fits.

A compiled program gives what it shows at its end. Where all taps together are too large for the device, one program a
window shows those of its blocks, the last window first. It also shows what its first block reads of the blocks before
it, and the gradient of that, which is where the backward pass of the window before begins. So what two windows share
has one gradient; that it has the same bits in the forward pass of both makes the windows one observation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lockstep.core.components.precision import FORMATS
from lockstep.core.config.schema import RunConfig
from lockstep.core.model.families import graph_of
from lockstep.core.model.graph import Operation
from lockstep.core.model.names import GRADIENT, parameter_shapes, probe_shapes


@dataclass(frozen=True)
class Window:
    """The taps and gradients that one program shows.

    names: as `observe` takes them. border: taps of the window before that this one reads, shown by both.
    """

    names: frozenset[str]
    border: frozenset[str] = frozenset()


def windows_of(config: RunConfig, asked: Collection[str], rows: int, budget: float) -> list[Window]:
    """Cut what is asked of a program into windows of consecutive blocks, each of at most `budget` bytes or one block.

    rows: sequences that are shown. Embedding and head are segments like a block.
    """
    sizes, wanted = _sizes(config, rows), set(asked)
    operations = graph_of(config.model, config.attention, config.loss).operations
    found: list[list[Operation]] = []
    for _, group in itertools.groupby(operations, key=lambda one: one.layer):
        segment = list(group)
        if found and _cost(_names([*found[-1], *segment]) & wanted, sizes) <= budget:
            found[-1] += segment
        else:
            found.append(segment)
    made: list[Window] = []
    for group_of_one in found:
        own = {one.tap for one in group_of_one}
        border = {tap for one in group_of_one for tap in one.reads.values() if tap not in own}
        names = _names(group_of_one) | {GRADIENT + tap for tap in border}
        made.append(Window(frozenset(names & wanted), frozenset(border & wanted)))
    given = [{GRADIENT + tap for later in made[n + 1 :] for tap in later.border} for n in range(len(made))]
    # The backward pass of a window goes on to those before. A parameter that they read too is shown by the first alone.
    shown: set[str] = set()
    parts: list[Window] = []
    for one, later in zip(made, given, strict=True):
        parts.append(Window(one.names - later - shown, one.border))
        shown |= parts[-1].names
    return parts


def summed_edges(config: RunConfig, parts: Sequence[Window]) -> dict[str, frozenset[str]]:
    """Return the edges of parameters that a later window reads too; their gradients are to be added."""
    found: dict[str, set[str]] = {}
    for one in graph_of(config.model, config.attention, config.loss).operations:
        for role, name in one.params.items():
            first = [window for window in parts if GRADIENT + name in window.names]
            edge = GRADIENT + one.edges.get(role, "")
            if first and edge != GRADIENT and edge not in first[0].names:
                found.setdefault(GRADIENT + name, set()).add(edge)
    return {name: frozenset(edges) for name, edges in found.items()}


def device_bytes(config: RunConfig, rows: int, budget: float) -> float:
    """Return bytes on the device of the dearest window of a check's names; without a budget, of all at once."""
    sizes = _sizes(config, rows)
    asked = _names(graph_of(config.model, config.attention, config.loss).operations)
    parts = windows_of(config, asked, rows, budget) if budget else [Window(frozenset(asked))]
    return max(_cost(window.names | window.border, sizes) for window in parts)


def _names(operations: Collection[Operation]) -> set[str]:
    """Return the names of some operations' taps and edges, and of the gradients of taps, edges and parameters."""
    found = {name for one in operations for name in (one.tap, GRADIENT + one.tap)}
    found |= {GRADIENT + edge for one in operations for edge in one.edges.values()}
    return found | {GRADIENT + name for one in operations for name in one.params.values()}


def _sizes(config: RunConfig, rows: int) -> dict[str, int]:
    """Return bytes that each name costs on the device: a tap once, its gradient with the zero that is added to it."""
    number = FORMATS[config.precision.stream].bytes
    taps = {n: number * math.prod(s) for n, s in probe_shapes(config.model, rows, config.train.sequence_length).items()}
    weights = {n: number * math.prod(shape) for n, shape in parameter_shapes(config.model).items()}
    doubled = {GRADIENT + name: 2 * size for name, size in taps.items()}
    return taps | doubled | {GRADIENT + name: size for name, size in weights.items()}


def _cost(names: Collection[str], sizes: dict[str, int]) -> float:
    return float(sum(sizes.get(name, 0) for name in names))
