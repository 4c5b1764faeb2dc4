"""The numbers that the codes of 8-bit moments stand for (Dettmers et al. 2022, arXiv 2110.02861)."""

from __future__ import annotations

from functools import cache

import numpy as np

# Least scale of a block of 8-bit moments (torchao/optim/quant_utils.py).
LEAST_SCALE = 1e-12


@cache
def quantisation_map(signed: bool) -> np.ndarray:
    """Return the 256 numbers of a block's codes, ascending, float32; the last is 1 (Dettmers et al. 2022, 1.3).

    Seven decades, from 10⁻⁶ to 1, of which each has twice the numbers of the one below, in the middle of equal parts of
    [0.1, 1]; and 0. With a sign, half of them are negative, and −1 is not among them. The parts are `torch.linspace`'s
    to the bit: a multiple of the FP32 step from the nearer end, with a fused multiply-add.
    """
    single = np.float32
    values = [single(0), single(1)]
    for decade in range(7):
        count = 2**decade * (1 if signed else 2)
        at, step = np.arange(count + 1), float((single(1) - single(0.1)) / single(count))
        exact = np.where(at < (count + 1) // 2, float(single(0.1)) + step * at, 1.0 - step * (count - at))
        parts = exact.astype(single)
        middles = (parts[:-1] + parts[1:]) / single(2) * single(10.0 ** (decade - 6))
        values += [*middles, *(-middles if signed else ())]
    return np.sort(np.asarray(values, single))
