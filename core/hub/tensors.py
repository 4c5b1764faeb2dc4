"""Parameters under their canonical names and tensors as a Hugging Face folder holds them, one from the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from lockstep.core.config.sections import ModelConfig
from lockstep.core.hub.family import HubFamily, Stored
from lockstep.core.model.graph import Shape
from lockstep.core.model.names import parameter_shapes


def stored_tensors(family: HubFamily, model: ModelConfig) -> list[Stored]:
    """Return their tensors of a model, in our canonical order, a tied head left out.

    Raises ValueError unless each parameter of the model stands in exactly one of them: then the table of the family is
    wrong.
    """
    shapes = parameter_shapes(model)
    order = {name: number for number, name in enumerate(shapes)}
    found = []
    for stored in family.tensors:
        for layer in range(model.layers) if "{i}" in stored.theirs else (0,):
            ours = tuple(name.format(i=layer) for name in stored.ours)
            here = [name for name in ours if name in shapes]
            if here and len(here) < len(ours):
                raise ValueError(f"{stored.theirs}: of {', '.join(ours)} the model has {', '.join(here)} alone")
            if here:
                found.append(replace(stored, theirs=stored.theirs.format(i=layer), ours=ours))
    held = [name for stored in found for name in stored.ours]
    if len(held) != len(set(held)) or set(held) != set(shapes):
        differ = sorted(shapes.keys() ^ set(held)) or sorted(name for name in set(held) if held.count(name) > 1)
        raise ValueError(f"{family.name}: {', '.join(differ[:3])}: not exactly one tensor of {family.architecture}")
    return sorted(found, key=lambda stored: order[stored.ours[0]])


def their_shape(stored: Stored, shapes: Mapping[str, Shape]) -> Shape:
    """Return the shape of their tensor. shapes: of our parameters."""
    rows = sum(shapes[name][0] for name in stored.ours)
    shape = (rows, *shapes[stored.ours[0]][1:])
    return shape[::-1] if stored.transposed else shape


def to_theirs(stored: Stored, ours: Callable[[str], np.ndarray]) -> np.ndarray:
    """Return their tensor of our parameters, which `ours` gives by name."""
    parts = [ours(name) for name in stored.ours]
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return np.ascontiguousarray(whole.T) if stored.transposed else whole


def to_ours(stored: Stored, theirs: np.ndarray, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, np.ndarray]]:
    """Return our parameters in their tensor, by name. shapes: of our parameters."""
    whole = theirs.T if stored.transposed else theirs
    begin = 0
    for name in stored.ours:
        end = begin + shapes[name][0]
        yield name, np.ascontiguousarray(whole[begin:end])
        begin = end
