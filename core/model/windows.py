"""Windows of a model: groups of blocks whose taps are recorded by one program, so that the taps fit on the device.

A compiled program returns its taps at its end. If all taps are too large for the device, one program per window records
the taps of its blocks; the last window comes first. A program also records the tensors that its first block reads from
the blocks before, and their gradients. The backward pass of the window before begins with these gradients. Two windows
share these tensors, and a check requires that they have the same bits in both programs.
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
    """The taps and gradients that one program records.

    names: names for `observe`. border: taps of the window before that this one reads; both windows record them.
    """

    names: frozenset[str]
    border: frozenset[str] = frozenset()


def windows_of(config: RunConfig, asked: Collection[str], rows: int, budget: float) -> list[Window]:
    """Divide the requested names into windows of consecutive blocks, each of at most `budget` bytes or one block.

    asked: names for `observe`. rows: number of sequences that are recorded. Embedding and head count as blocks.
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
    # The backward pass continues to earlier windows. A parameter that several windows read is recorded by the first.
    shown: set[str] = set()
    parts: list[Window] = []
    for one, later in zip(made, given, strict=True):
        parts.append(Window(one.names - later - shown, one.border))
        shown |= parts[-1].names
    return parts


def summed_edges(config: RunConfig, parts: Sequence[Window]) -> dict[str, frozenset[str]]:
    """Return, for parameters that a later window also reads, the edges whose gradients must be added to theirs."""
    found: dict[str, set[str]] = {}
    for one in graph_of(config.model, config.attention, config.loss).operations:
        for role, name in one.params.items():
            first = [window for window in parts if GRADIENT + name in window.names]
            edge = GRADIENT + one.edges.get(role, "")
            if first and edge != GRADIENT and edge not in first[0].names:
                found.setdefault(GRADIENT + name, set()).add(edge)
    return {name: frozenset(edges) for name, edges in found.items()}


def device_bytes(config: RunConfig, rows: int, budget: float) -> float:
    """Return the device bytes of the largest window for a check's names; without a budget, of all names together."""
    sizes = _sizes(config, rows)
    asked = _names(graph_of(config.model, config.attention, config.loss).operations)
    parts = windows_of(config, asked, rows, budget) if budget else [Window(frozenset(asked))]
    return max(_cost(window.names | window.border, sizes) for window in parts)


def _names(operations: Collection[Operation]) -> set[str]:
    """Return the names of operations' taps, and of the gradients of their taps, edges and parameters."""
    found = {name for one in operations for name in (one.tap, GRADIENT + one.tap)}
    found |= {GRADIENT + edge for one in operations for edge in one.edges.values()}
    return found | {GRADIENT + name for one in operations for name in one.params.values()}


def _sizes(config: RunConfig, rows: int) -> dict[str, int]:
    """Return the device bytes of each name; the gradient of a tap counts twice, because it needs a probe of zeros."""
    number = FORMATS[config.precision.stream].bytes
    taps = {n: number * math.prod(s) for n, s in probe_shapes(config.model, rows, config.train.sequence_length).items()}
    weights = {n: number * math.prod(shape) for n, shape in parameter_shapes(config.model).items()}
    doubled = {GRADIENT + name: 2 * size for name, size in taps.items()}
    return taps | doubled | {GRADIENT + name: size for name, size in weights.items()}


def _cost(names: Collection[str], sizes: dict[str, int]) -> float:
    return float(sum(sizes.get(name, 0) for name in names))
