"""The sources of a mixture that have one more sample in a period, as an exact function of the period's number."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate


def carries_before(rates: Sequence[Fraction], period: int) -> tuple[int, ...]:
    """Return how many of the first `period` periods choose each source, in O(k) integer operations.

    Every period chooses m = sum(rates) sources, each at most once. Source s is chosen in a fraction `rates[s]` of the
    periods. The sources are the leaves of a balanced tree. A node has the rate F, the sum of its leaves' rates. In a
    period, floor(F) or floor(F) + 1 of its leaves are chosen; a residual bit per period distinguishes the two cases.

    If the fractional parts of two children add up to less than 1, a bit of the node is passed to one child. The
    children alternate in the ratio of their fractional parts. If the parts add up to 1 or more, the same holds for the
    periods without a bit. The number of bits that a child gets of n is n·share, rounded to the nearest integer, with an
    error of at most 1/2. This is the pivotal method of sampling (Deville & Tillé 1998), deterministic instead of
    random.

    A node's error is at most its parent's plus 1/2, and the root has no error, because m is an integer. Therefore
    |chosen[s] - rates[s] · period| <= ceil(log2(k)) / 2 for every period.

    Args:
        rates: (k,), each in [0, 1); their sum is an integer.
        period: >= 0.

    Returns:
        (k,): how often each source was chosen; the sum is m · period. From one period to the next, each number grows
        by 0 or 1.

    Raises:
        ValueError: a rate outside [0, 1), a sum that is not an integer, or a negative period.
    """
    total = sum(rates, Fraction(0))
    if period < 0 or any(not 0 <= rate < 1 for rate in rates) or total.denominator != 1:
        raise ValueError(f"rates in [0, 1) with a whole sum, and a period >= 0; got {list(rates)}, {period}")
    upto = (Fraction(0), *accumulate(rates))
    found = [0] * len(rates)

    def fraction(begin: int, end: int) -> Fraction:
        return (upto[end] - upto[begin]) % 1

    def split(begin: int, end: int, bits: int) -> None:
        """Divide the bits of the node with the leaves [begin, end), in all earlier periods, among its children."""
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
    """Return count · part / whole, rounded to the nearest integer, halves up; 0 if `whole` is 0."""
    if not whole:
        return 0
    share = part / whole
    return (2 * count * share.numerator + share.denominator) // (2 * share.denominator)
