"""Widen bounds for tensors of few numbers."""

from __future__ import annotations

import math

# For this count of numbers, sampling scatter equals the scatter that clean runs show on tensors of any size.
SCATTER_SIZE = 256


def scatter(size: int) -> float:
    """Return the factor by which a bound is wider for a tensor of `size` numbers: √(1 + 256 / size)."""
    return math.sqrt(1.0 + SCATTER_SIZE / size)
