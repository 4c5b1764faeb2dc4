"""The widening of a band for few numbers."""

from __future__ import annotations

import math

# For this many numbers, sampling scatter equals the scatter that clean runs show on tensors of any size.
SCATTER_SIZE = 256


def scatter(size: int) -> float:
    """Return how much wider a band is for a tensor of `size` numbers: √(1 + 256 / size), 1 for large ones."""
    return math.sqrt(1.0 + SCATTER_SIZE / size)
