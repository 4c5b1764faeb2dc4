"""Moments rounded to the numbers that 8-bit codes stand for, as torchao does."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from lockstep.core.components.eight_bit_codes import LEAST_SCALE, quantisation_map
from lockstep.core.components.optimizers import BLOCK


def in_codes(x: Array, signed: bool) -> Array:
    """Round x, float32, to what its 8-bit codes and a scale a block of 256 stand for (torchao/optim/quant_utils.py).

    A number becomes the nearer of its two neighbours on the map, the upper one at a tie.
    """
    levels = jnp.asarray(quantisation_map(signed))
    blocks = x.reshape(-1, BLOCK)
    scale = jnp.maximum(jnp.abs(blocks).max(1, keepdims=True), LEAST_SCALE)
    scaled = blocks / scale
    below = jnp.clip(jnp.searchsorted(levels, scaled, side="right") - 1, 0, 255)
    above = jnp.minimum(below + 1, 255)
    nearer = scaled - levels[below] >= (levels[above] - levels[below]) * 0.5
    return (levels[jnp.where(nearer, above, below)] * scale).reshape(x.shape)
