"""A curriculum of sequence lengths as text: lengths in their order, and each length's share of the run's steps.

`2048:0.9, 4096:0.1`: the first nine tenths of the steps have 2048 tokens per sequence, the last tenth has 4096.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import accumulate

_PIECE = re.compile(r"([1-9]\d{0,8})\s*:\s*(\d{1,3}(?:\.\d{1,15})?|\.\d{1,15})")


@dataclass(frozen=True)
class Piece:
    """A phase of the run. length: tokens per sequence. share: its share of the run's steps, exactly as written."""

    length: int
    share: Fraction


@cache
def pieces(text: str) -> tuple[Piece, ...]:
    """Parse a curriculum into its phases; an empty text has none. Raises ValueError with a description of the error."""
    found = []
    for word in filter(None, map(str.strip, text.split(","))):
        match = _PIECE.fullmatch(word)
        if match is None:
            raise ValueError(f"{word[:40]!r} is not LENGTH:SHARE, such as 2048:0.9")
        found.append(Piece(int(match[1]), Fraction(match[2])))
        if not found[-1].share:
            raise ValueError(f"{word!r} has a share of zero steps")
    if found and (total := sum(piece.share for piece in found)) != 1:
        raise ValueError(f"the shares add up to {float(total):g}, not to 1")
    return tuple(found)


def last_steps(text: str, steps: int) -> tuple[int, ...]:
    """Return the last step of each phase in a run of `steps` steps: (sum of the shares so far) · steps, rounded."""
    return tuple(round(share * steps) for share in accumulate(piece.share for piece in pieces(text)))


def problem(text: str, length: int, micro: int, steps: int) -> str | None:
    """Return the reason why a run with micro-batches of `micro` × `length` tokens cannot have a curriculum, or None."""
    lengths = [piece.length for piece in pieces(text)]
    if not lengths:
        return None
    if length not in lengths:
        return f"{length} tokens a sequence is not one of its lengths; batch sizes and validation use that length"
    longest = max(lengths)
    for other in lengths:
        if longest % other:
            return f"a length of {other} does not divide the longest, {longest}"
        if micro * length % other:
            return f"a micro-batch of {micro} × {length} tokens is not a whole number of sequences of {other}"
    ends = last_steps(text, steps)
    for piece, first, last in zip(pieces(text), (0, *ends), ends, strict=False):
        if first == last:
            return f"no step of {steps} is left for the share of {float(piece.share):g} at a length of {piece.length}"
    return None
