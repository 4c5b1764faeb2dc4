"""A shuffle as a pure function of the index, without a stored permutation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_U64 = np.uint64
_GOLDEN = _U64(0x9E3779B97F4A7C15)
_SEED_LIMIT = 1 << 64
# splitmix64's finaliser: pairs of a shift and the factor after it.
_FINALISER = ((_U64(30), _U64(0xBF58476D1CE4E5B9)), (_U64(27), _U64(0x94D049BB133111EB)))
_LAST_SHIFT = _U64(31)


def permute(indices: NDArray[np.int64], epochs: NDArray[np.int64], size: int, seed: int) -> NDArray[np.int64]:
    """Apply the permutation of [0, size) for (seed, epoch) to each index.

    The permutation is a balanced Feistel network over the smallest power of four >= size, which is a bijection for any
    round function (Luby & Rackoff 1988). It is applied repeatedly until the result is in [0, size) (Black & Rogaway
    2002). The round function is splitmix64's finaliser (Steele, Lea & Flood 2014) with a key per (seed, epoch, round).
    grain's `index_shuffle` also defines a data order as a pure function of the index.

    Args:
        indices: int64, any shape, in [0, size).
        epochs: int64 >= 0, the same shape.
        size: number of indices, >= 1.
        seed: in [0, 2**64).

    Returns:
        int64, the shape of `indices`; for a fixed epoch, a bijection of [0, size).

    Raises:
        ValueError: shapes differ, an index or epoch or the seed is out of range.
    """
    _check(indices, epochs, size, seed)
    half_bits = _U64(((size - 1).bit_length() + 1) // 2)
    if half_bits == 0:
        return np.zeros(indices.shape, dtype=np.int64)
    values, epochs = indices.astype(_U64).ravel(), epochs.ravel()
    # Computing keys costs as much as the rest of a round. Indices of one epoch, the usual case, share them.
    share = bool(epochs.size) and epochs.min() == epochs.max()
    epoch_keys = _mix((epochs[:1] if share else epochs).astype(_U64) * _GOLDEN + _mix(np.array([seed], dtype=_U64)))
    # Keys by round and index; repeated applications use the same keys.
    keys = _mix(epoch_keys + np.arange(1, _ROUNDS + 1, dtype=_U64)[:, None] * _GOLDEN)
    values = _feistel(values, keys, half_bits)
    outside = np.flatnonzero(values >= _U64(size))
    while outside.size:
        values[outside] = _feistel(values[outside], keys if share else keys[:, outside], half_bits)
        outside = outside[values[outside] >= _U64(size)]
    return values.astype(np.int64).reshape(indices.shape)


def mixed(values: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Return 64 pseudo-random bits for each number: splitmix64's finaliser, keyed by `seed`."""
    return _mix(values * _GOLDEN + _mix(np.array([seed], dtype=_U64)))


def _feistel(values: NDArray[np.uint64], keys: NDArray[np.uint64], half_bits: np.uint64) -> NDArray[np.uint64]:
    mask = (_U64(1) << half_bits) - _U64(1)
    left, right, shift = values >> half_bits, values & mask, _U64(64) - half_bits
    for round_keys in keys:
        # Use the high bits of the finaliser, which depend on all input bits.
        mixed_right = _mix_in_place(right ^ round_keys)
        mixed_right >>= shift
        mixed_right ^= left
        left, right = right, mixed_right
    return (left << half_bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply splitmix64's finaliser to each value."""
    return _mix_in_place(values.copy())


def _mix_in_place(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser to an array in place; uint64 arithmetic wraps around, as the algorithm requires."""
    for shift, factor in _FINALISER:
        values ^= values >> shift
        values *= factor
    values ^= values >> _LAST_SHIFT
    return values


def _check(indices: NDArray[np.int64], epochs: NDArray[np.int64], size: int, seed: int) -> None:
    if indices.shape != epochs.shape:
        raise ValueError(f"indices {indices.shape} and epochs {epochs.shape} must have one shape")
    if size < 1 or not 0 <= seed < _SEED_LIMIT:
        raise ValueError(f"size must be >= 1 and seed in [0, 2**64); got size={size}, seed={seed}")
    if indices.size and (indices.min() < 0 or indices.max() >= size or epochs.min() < 0):
        raise ValueError(f"indices must lie in [0, {size}) and epochs must not be negative")
