"""The sources of a mixture with one sample more than the others in a period: an exact function of its number."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate


def carries_before(rates: Sequence[Fraction], period: int) -> tuple[int, ...]:
    """Return how many of the first `period` periods choose each source, in O(k) integer operations.

    Every period chooses m = sum(rates) sources, each at most once, and source s in a share of `rates[s]` of the
    periods. The sources are the leaves of a balanced tree. A node with the rate F = sum of its leaves has
    floor(F) or floor(F) + 1 of the chosen sources in a period; a residual bit per period distinguishes the two. Where
    the fractional parts of two children add up to less than 1, a bit of the node is a bit of one child, and the two
    take turns in the ratio of their fractional parts. Where they add up to 1 or more, the same holds for the periods
    without a bit. Turns are n·share to the nearest integer, so a turn is off by 1/2 at most. This is the pivotal method
    of sampling (Deville & Tillé 1998) with turns in place of draws.

    The bound: a node's error is at most its parent's plus 1/2, and the root has none, since m is an integer. So
    |chosen[s] - rates[s] · period| <= ceil(log2(k)) / 2, whatever the period.

    Args:
        rates: (k,), each in [0, 1); they add up to an integer.
        period: >= 0.

    Returns:
        (k,): times that each source was chosen; they add up to m · period. From one period to the next each grows by
        0 or 1.

    Raises:
        ValueError: a rate outside [0, 1), a sum that is no integer, or a negative period.
    """
    total = sum(rates, Fraction(0))
    if period < 0 or any(not 0 <= rate < 1 for rate in rates) or total.denominator != 1:
        raise ValueError(f"rates in [0, 1) with a whole sum, and a period >= 0; got {list(rates)}, {period}")
    upto = (Fraction(0), *accumulate(rates))
    found = [0] * len(rates)

    def fraction(begin: int, end: int) -> Fraction:
        return (upto[end] - upto[begin]) % 1

    def split(begin: int, end: int, bits: int) -> None:
        """Pass the bits of the node of the leaves [begin, end), in all periods before this one, to its children."""
        if end - begin == 1:
            found[begin] = bits
            return
        middle = (begin + end + 1) // 2
        first, second = fraction(begin, middle), fraction(middle, end)
        if first + second < 1:
            left = _turns(bits, first, first + second)
            right = bits - left
        else:
            without = period - bits
            none = _turns(without, 1 - first, 2 - first - second)
            left, right = period - none, period - (without - none)
        split(begin, middle, left)
        split(middle, end, right)

    if rates:
        split(0, len(rates), 0)
    return tuple(found)


def _turns(count: int, part: Fraction, whole: Fraction) -> int:
    """Return count · part / whole to the nearest integer, halves up; 0 where there is nothing to share."""
    if not whole:
        return 0
    share = part / whole
    return (2 * count * share.numerator + share.denominator) // (2 * share.denominator)
