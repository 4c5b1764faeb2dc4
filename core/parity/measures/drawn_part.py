"""Draw the part of a parameter whose moments and update are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from lockstep.core.config.schema import RunConfig
from lockstep.core.model.graph import Shape
from lockstep.core.model.groups import update_rules
from lockstep.core.model.names import parameter_shapes

# Number of elements of each parameter that are compared, unless all are.
FEW = 1 << 14


def parts_of_all(config: RunConfig, step: int) -> Mapping[str, tuple[slice, Shape]]:
    """Draw some elements of each parameter, as `drawn_part` does, by name.

    A matrix that Muon updates is examined whole, so only the smallest of them is included.
    """
    shapes, rules = parameter_shapes(config.model), update_rules(config)
    whole = [name for name in shapes if rules[name].together is None]
    smallest = min(whole, key=lambda name: (math.prod(shapes[name]), name), default=None)
    chosen = [name for name in shapes if rules[name].together is not None or name == smallest]
    return {name: drawn_part(config, name, step, FEW) for name in chosen}


def drawn_part(config: RunConfig, name: str, step: int, asked: int | str) -> tuple[slice, Shape]:
    """Draw the elements of a parameter that are examined after `step` steps. Returns their row-major slice and shape.

    asked: the number of elements, rounded up to whole rows and to whole blocks of 8-bit codes; or "all".
    The rows are drawn from the run's seed and the step, so that no row is left out for good whichever steps are
    checked. A parameter that its rule updates as a whole (Muon's matrices), or that is no larger than `asked`, is
    examined whole.
    """
    shape, together = parameter_shapes(config.model)[name], update_rules(config)[name].together
    size = math.prod(shape)
    if isinstance(asked, str) or together is None or size <= asked:
        return slice(0, size), shape
    row = size // shape[0]
    at_once = together // math.gcd(row, together)
    rows = min(shape[0], -(-asked // (row * at_once)) * at_once)
    parts = -(-shape[0] // rows)
    drawn = int(np.random.Generator(np.random.Philox(key=(config.seed, step))).integers(1 << 32)) * parts >> 32
    # The last part also starts at a block, and ends with the parameter.
    first = min(drawn * rows, -(-(shape[0] - rows) // at_once) * at_once)
    rows = min(rows, shape[0] - first)
    return slice(first * row, (first + rows) * row), (rows, *shape[1:])
