"""LayerNorm (Ba et al. 2016). Twin: torch_backend/kernels/layer_norm.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def layer_norm(x: Array, gain: Array, bias: Array, eps: float) -> Array:
    """Return (x − mean) / √(var + eps) · gain + bias, written out: x (…, D), gain and bias (D,)."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps) * gain + bias
