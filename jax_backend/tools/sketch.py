"""Sketches in JAX. Twin: core/parity/evidence/sketch.py, which defines a sketch."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array

from lockstep.core.parity.evidence.sketch import GOLDEN, MULTIPLIERS, SHIFTS, K


def signs(start: int, count: int) -> Array:
    """Return the signs of coordinates start … start + count − 1 as float32, ±1; start may exceed 2³²."""
    n = jnp.arange(start, start + count, dtype=jnp.uint64)
    low, high = n.astype(jnp.uint32), (n >> 32).astype(jnp.uint32)
    h = low ^ (high * jnp.uint32(GOLDEN))
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        h = (h ^ (h >> shift)) * jnp.uint32(multiplier)
    h = h ^ (h >> SHIFTS[2])
    return 1 - 2 * (h & 1).astype(jnp.float32)


def sketch(x: Array, offset: int = 0) -> Array:
    """Return S(x), (K,), for coordinates offset … offset + size − 1: float64 for float64 input, else float32."""
    flat = x.reshape(-1).astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    before = offset % K
    rows = -(-(before + flat.size) // K)
    padded = jnp.pad(flat, (before, rows * K - before - flat.size))
    return (padded * signs(offset - before, rows * K).astype(flat.dtype)).reshape(rows, K).sum(0)


def lift(probe: Array, shape: tuple[int, ...]) -> Array:
    """Return Sᵀ·probe: (K,) → `shape`, in the probe's dtype. The probe's gradient is the sketch of the result's."""
    size = math.prod(shape)
    return (jnp.resize(probe, (size,)) * signs(0, size).astype(probe.dtype)).reshape(shape)
