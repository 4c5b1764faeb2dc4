"""The operators that apply at a place: changes of a tensor, of ids, or of one number."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.core.config.schema import RunConfig
from lockstep.core.mutate.mutant import Operator
from lockstep.core.mutate.places import Place

# In words, for pages and help.
OPERATORS: dict[str, str] = {
    "drop": "zeros in its place",
    "twice": "two times it",
    "scale": "1 ± 2⁻ᵏ times it",
    "narrow": "rounded to a narrower format and back",
    "truncate": "cut off to a narrower format, toward zero, and back",
    "zero": "zeros in one row, position, head or column",
    "shift": "moved by one along an axis, the last one first",
    "swap": "the first two of an axis exchanged",
    "flip": "its sign turned",
    "other": "another tensor of the same shape",
    "stale": "that of the step before",
    "factor": "so many times it: another epsilon, decay or rate",
    "own": "that of the rank by itself",
}
# 2⁻ᵏ of `scale`.
POWERS = range(1, 13)
FORMATS = ("bf16", "fp16", "e4m3")
# Formats that bits are cut off to, and the bits of FP32's mantissa that they lack.
CUT = {"tf32": 13, "bf16": 16}
WHERE = ("first", "middle", "last")
# Kinds for which the tensor of the previous step is available.
_REMEMBERED = ("gradient", "moment", "update", "batch")


def operators(config: RunConfig, place: Place) -> list[Operator]:
    """Return every operator that applies at a place of a run."""
    if place.kind == "reduced":
        return [Operator("own")]
    if place.name == "step_count":
        return [Operator("drop"), Operator("twice")]
    if place.integer:
        return [*_of_axes(place), *([Operator("stale")] if place.kind == "batch" else [])]
    if place.kind == "scalar" and (place.name.startswith("optimizer.") or place.name.endswith(".eps")):
        found = [Operator("drop"), *(Operator("factor", (x,)) for x in ("0.1", "10"))]
        return found if place.name.endswith("eps") else [*found, Operator("twice"), *_scales()]
    # The loss of many programs is in FP64, which is not truncated to another format.
    numbers = [Operator("drop"), Operator("twice"), Operator("flip"), *_scales()]
    if not place.axes:
        return [*numbers, Operator("narrow", ("bf16",))]
    # Loss weights, 1 and its halves, are exact in every format.
    rounded = place.name != "weights"
    if rounded:
        numbers += [Operator("narrow", (name,)) for name in FORMATS]
    if rounded and not config.precision.exact:
        numbers += [Operator("truncate", (name,)) for name in CUT]
    if place.other:
        numbers.append(Operator("other"))
    if place.kind in _REMEMBERED:
        numbers.append(Operator("stale"))
    return [*numbers, *_of_axes(place)]


def _scales() -> Iterator[Operator]:
    for power in POWERS:
        for sign in "+-":
            yield Operator("scale", (f"{sign}2^-{power}",))


def _of_axes(place: Place) -> Iterator[Operator]:
    for axis in place.axes:
        for where in WHERE:
            yield Operator("zero", (axis, where))
        yield Operator("shift", (axis,))
        yield Operator("swap", (axis,))
