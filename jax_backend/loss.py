"""Per-token cross-entropy of FP32 logits, computed in FP64 and rounded once. Twin: torch_backend/loss.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def negative_log_likelihood(logits_BSV: Array, targets_BS: Array, z_loss: float = 0.0) -> Array:
    """Return logsumexp(logits) − the target's logit, plus z-loss: (B, S, V), (B, S) → (B, S) in nats, their dtype.

    The loss is −log softmax(logits)[target] + z_loss · logsumexp(logits)² (Chowdhery et al. 2022, section 5).
    """
    wide_BSV = logits_BSV.astype(jnp.float64)
    chosen_BS = jnp.take_along_axis(wide_BSV, targets_BS[..., None], axis=-1)[..., 0]
    logsumexp_BS = jax.nn.logsumexp(wide_BSV, axis=-1)
    return (logsumexp_BS - chosen_BS + z_loss * jnp.square(logsumexp_BS)).astype(logits_BSV.dtype)


def weighted_mean(nll_BS: Array, weights_BS: Array, total: Array) -> Array:
    """Return Σ weight·nll / total, accumulated in FP64: a float64 scalar."""
    wide = nll_BS.astype(jnp.float64) * weights_BS.astype(jnp.float64)
    return wide.sum() / total.astype(jnp.float64)
