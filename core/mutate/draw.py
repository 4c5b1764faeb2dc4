"""Draw mutants of a run by a seed; a larger draw begins with the same mutants."""

from __future__ import annotations

import difflib
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NoReturn

from lockstep.core.config.schema import RunConfig
from lockstep.core.errors import UserError
from lockstep.core.mutate.mutant import Mutant
from lockstep.core.mutate.operators import operators
from lockstep.core.mutate.places import Place, places


def mutants(config: RunConfig) -> Iterator[Mutant]:
    """Yield every mutant of a run: each place with each of its operators under each of its conditions."""
    for place in places(config):
        for operator in operators(config, place):
            for condition in place.conditions:
                yield Mutant(place.name, place.kind, operator, condition)


def draw(config: RunConfig, count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants, or all if there are fewer.

    Without replacement, and weighted so that every kind of place, every operator and every condition has its share: a
    mutant's weight is 1 / (mutants of its kind, operator and condition together) (Efraimidis & Spirakis 2006).
    """
    every = list(mutants(config))
    cell = Counter(_cell(one) for one in every)
    # The smallest of count independent exponential times, of rate 1 / cell.
    keyed = sorted((-math.log(_uniform(seed, str(one))) * cell[_cell(one)], str(one), one) for one in every)
    return [one for _, _, one in keyed[:count]]


def _cell(one: Mutant) -> tuple[str, str, str]:
    return one.kind, one.operator.name, one.condition


def _uniform(seed: int, text: str) -> float:
    """Return a number in (0, 1) that follows from the seed and the text alone, the same on every machine."""
    digest = hashlib.sha256(f"{seed}/{text}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") + 0.5) / 2**64


@lru_cache(maxsize=4)
def _by_name(config_json: str) -> dict[tuple[str, str], Place]:
    config = RunConfig.model_validate_json(config_json)
    return {(place.name, place.kind): place for place in places(config)}


def place_of(config: RunConfig, mutant: Mutant) -> Place:
    """Return the place of a mutant. Raises UserError unless the run has this mutant."""
    known = _by_name(config.model_dump_json())
    place = known.get((mutant.place, mutant.kind))
    if place is None:
        _refuse(mutant, f"{mutant.place}:{mutant.kind}", [f"{name}:{kind}" for name, kind in known], "a place")
    if mutant.operator not in operators(config, place):
        _refuse(
            mutant, str(mutant.operator), [str(one) for one in operators(config, place)], "an operator at this place"
        )
    if mutant.condition not in place.conditions:
        _refuse(mutant, mutant.condition, place.conditions, "a condition at this place")
    return place


def _refuse(mutant: Mutant, part: str, known: Sequence[str], what: str) -> NoReturn:
    near = difflib.get_close_matches(part, known, n=1, cutoff=0.0)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"{mutant}: {part} is not {what} of this run{hint}")
