"""Compute the coefficient by which narrow gradients were clipped from their bits, far more closely than one unit.

Let a gradient g in bf16 or FP16 be multiplied by c and rounded once, to g'. Then |g·c − g'| is at most half the spacing
at g'. So each number gives an interval for c, and c is in the intersection of all intervals.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lockstep.core.backend import Arrays

# Format → stored bits of the mantissa, and the exponent of the smallest normal number.
FORMATS = {"bfloat16": (7, -126), "float16": (10, -14)}
# The product may be rounded to FP32 first, and the coefficient may be a quotient: a few roundings of 2^-24.
SLOP = 4 * 2.0**-24


def coefficients(before: Arrays, after: Arrays, dtypes: Mapping[str, str]) -> tuple[float, float] | None:
    """Return the interval of all c with which each bf16 or FP16 gradient in `after` is `before`·c, rounded once.

    Returns None if there is no such c, or if no number limits it. Numbers that became subnormal are left out.
    """
    low, high = 0.0, np.inf
    for name, array in before.items():
        if dtypes[name] not in FORMATS or name not in after:
            continue
        digits, least = FORMATS[dtypes[name]]
        old, new = array.astype(np.float64).ravel(), after[name].astype(np.float64).ravel()
        told = (np.abs(new) > 2.0**least) & np.isfinite(new) & (old != 0)
        old, new = old[told], new[told]
        if not old.size:
            continue
        if (np.sign(old) != np.sign(new)).any():
            return None
        old, new = np.abs(old), np.abs(new)
        fraction, exponent = np.frexp(new)
        above = np.ldexp(1.0, exponent - 1 - digits)
        # Below a power of two, the spacing is half as large.
        below = np.where(fraction == 0.5, above / 2, above)
        low = max(low, float(((new - below / 2) / old).max()))
        high = min(high, float(((new + above / 2) / old).min()))
    low, high = low * (1 - SLOP), high * (1 + SLOP)
    return (low, high) if low <= high < np.inf else None
