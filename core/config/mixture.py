"""A mixture of data sets as text: folders and their weights.

`data/code: 0.7, data/web: 0.3`: seven of every ten samples are from data/code. The sum of the weights need not be 1. A
weight may be a fraction such as `1/3`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import PurePath

from lockstep.core.files.paths import path_problem

# Limits for which the bound on the order of a mixture is proven (core/data/mixture_order.py).
MOST_SOURCES = 64
LEAST_SHARE = Fraction(1, 4096)

_WEIGHT = re.compile(r"\d{1,18}(?:\.\d{1,18})?|\.\d{1,18}|\d{1,18}/\d{1,18}")


@dataclass(frozen=True)
class Part:
    """A data set of a mixture.

    path: its folder. name: the last part of the path, or the whole path if two data sets would have the same name.
    weight: the weight, exactly as written.
    """

    path: str
    name: str
    weight: Fraction


@cache
def all_parts(text: str) -> tuple[Part, ...]:
    """Parse a mixture into its data sets, including those of weight zero; an empty text has none.

    Raises ValueError with a description of the error: a part that is not FOLDER:WEIGHT, a weight that is not a number,
    a repeated folder, weights whose sum is zero, too many data sets, or a share that is too small.
    """
    found: list[tuple[str, Fraction]] = []
    for word in filter(None, map(str.strip, text.split(","))):
        path, colon, number = map(str.strip, word.rpartition(":"))
        if not colon or not path:
            raise ValueError(f"{word[:60]!r} is not FOLDER:WEIGHT, such as data/code:0.7")
        if problem := path_problem(path):
            raise ValueError(f"{path[:60]!r}: {problem}")
        found.append((path, _weight(path, number)))
    places = [PurePath(path) for path, _ in found]
    for at, place in enumerate(places):
        if place in places[:at]:
            raise ValueError(f"{place} occurs twice: give each data set one weight")
    chosen = [weight for _, weight in found if weight]
    if found and not chosen:
        raise ValueError("the weights add up to zero")
    if len(chosen) > MOST_SOURCES:
        raise ValueError(f"{len(chosen)} data sets are more than {MOST_SOURCES}, the most that a mixture can have")
    total = sum(chosen, Fraction(0))
    for path, share in ((path, part / total) for path, part in found if part):
        if share < LEAST_SHARE:
            least = f"1/{LEAST_SHARE.denominator}"
            raise ValueError(f"{path} has a share of {float(share):.2g}; the least of a mixture is {least}")
    names = [place.name for place in places]
    return tuple(
        Part(path, place.name if names.count(place.name) == 1 else str(place), weight)
        for (path, weight), place in zip(found, places, strict=True)
    )


def parts(text: str) -> tuple[Part, ...]:
    """Return the data sets of a mixture with a weight above zero. Raises ValueError as `all_parts` does."""
    return tuple(part for part in all_parts(text) if part.weight)


def _weight(path: str, text: str) -> Fraction:
    if text.startswith("-"):
        raise ValueError(f"{path} has the weight {text[:20]}; a weight is zero or more")
    if not _WEIGHT.fullmatch(text):
        raise ValueError(f"{path} has the weight {text[:20]!r}; a weight is a number such as 0.7, 3 or 1/3")
    try:
        return Fraction(text)
    except ZeroDivisionError:
        raise ValueError(f"{path} has the weight {text[:20]!r}, which divides by zero") from None
