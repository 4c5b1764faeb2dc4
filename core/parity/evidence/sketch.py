"""Sketches: a linear map S from any array to K numbers (a count sketch, Charikar, Chen & Farach-Colton 2002).

Coordinate n, in row-major order, is added to bucket n mod K with a pseudo-random sign. S is linear, so S(c) − S(t) =
S(c − t), and ‖S(x)‖ estimates ‖x‖ with a relative deviation of about √(1/2K) = 2.2 %. K is prime, so that the
coordinates of one column of a matrix are spread over many buckets. Twins with the same signs, bit for bit:
torch_backend/tools/sketch.py and jax_backend/tools/sketch.py.
"""

from __future__ import annotations

import math

import numpy as np

from lockstep.core.parity.measures.stretches import stretches

K = 1021

# A mixing hash of 32 bits (lowbias32, Wellons 2018). The golden ratio spreads the high word of a coordinate first. A
# multiply-shift hash alone is not enough, because its signs are regular along strides.
GOLDEN, MULTIPLIERS, SHIFTS = 0x9E3779B9, (0x7FEB352D, 0x846CA68B), (16, 15, 16)

# The first signs are the same for every array, and are cached up to this count.
MOST_KEPT = 1 << 26
_kept = np.zeros(0, np.int8)


def hashed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Hash the coordinates high·2³² + low. Arrays of one shape, uint32 in and out."""
    h = low ^ (high * np.uint32(GOLDEN))
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(multiplier)
    return h ^ (h >> np.uint32(SHIFTS[2]))


def signs(start: int, count: int) -> np.ndarray:
    """Return the signs ±1 of the coordinates start … start + count − 1, int8 (count,); start may exceed 2³²."""
    found = np.empty(count, np.int8)
    for where in stretches(count):
        n = np.arange(start + where.start, start + where.stop, dtype=np.uint64)
        low, high = n.astype(np.uint32), (n >> np.uint64(32)).astype(np.uint32)
        found[where] = 1 - 2 * (hashed(low, high) & np.uint32(1)).astype(np.int8)
    return found


def _signs(start: int, count: int) -> np.ndarray:
    """Return `signs(start, count)`, from the cache if possible."""
    global _kept
    if start + count > MOST_KEPT:
        return signs(start, count)
    if len(_kept) < start + count:
        _kept = signs(0, min(max(2 * (start + count), 1 << 16), MOST_KEPT))
    return _kept[start : start + count]


def sketch(x: np.ndarray, offset: int = 0) -> np.ndarray:
    """Return S(x), (K,) float64 for float64 input, else float32.

    offset: coordinate of the first element, in row-major order. Sketches of the parts of an array, each at its offset,
    add up to the sketch of the whole. A number in x that is not finite makes its bucket not finite.
    """
    dtype = np.float64 if x.dtype == np.float64 else np.float32
    flat = np.ascontiguousarray(x, dtype).reshape(-1)
    sign = _signs(offset, flat.size)
    before = offset % K
    rows = -(-(before + flat.size) // K)
    padded = np.zeros(rows * K, dtype)
    np.multiply(flat, sign, out=padded[before : before + flat.size])
    total: np.ndarray = padded.reshape(rows, K).sum(0)
    return total


def lift(probe: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return Sᵀ·probe: (K,) → an array of `shape` in the probe's dtype, with ⟨S(x), p⟩ = ⟨x, Sᵀ·p⟩."""
    size = math.prod(shape)
    return np.resize(probe, size).reshape(shape) * _signs(0, size).reshape(shape)
