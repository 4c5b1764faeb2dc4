"""AdamW with 8-bit moments in the order of bitsandbytes' CPU kernels.

Twin: torch_backend/kernels/bitsandbytes_adamw.py.

Sources, of 0.50: bitsandbytes/backends/cpu/ops.py, `_optimizer_update_8bit_blockwise_cpu` and
`_optimizer_update_32bit_cpu`; the quantiser is in C++ and was found by experiment. λ and lr are the group's own, c₁ and
c₂ are 1 − β₁ᵗ and √(1 − β₂ᵗ) in FP64, and (a·b + c) is one fused multiply-add, as torch's `add_` and `addcmul_` have
it::

    m ← ((1 − β₁)·g + β₁·m)            v ← ((1 − β₂)·g · g + β₂·v)
    p ← p · (1 − lr·λ)
    p ← p + (−lr/c₁ · m) / (√v / c₂ + ε)                    with 8-bit moments
    p ← (−lr·c₂/c₁ · (m / (√v + ε·c₂)) + p)                 with FP32 moments, of small tensors
    m, v ← in codes and scales                              with 8-bit moments

All of it is written in FP64 with each rounding explicit: XLA may contract FP32 operations, and FP64 holds the product
of two FP32 numbers. Moments are the library's bits. Weights are so but for torch's √, which MKL gives an ulp off for a
fifth of all numbers.

The CUDA kernels differ, and are not mirrored: weights decay after the step; quotients and powers are approximate
(`__fdividef`, `__powf`); a number becomes the nearest code that has its sign.
"""

from __future__ import annotations

from functools import cache

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from lockstep.core.components.eight_bit_codes import quantisation_map
from lockstep.core.components.optimizers import BLOCK
from lockstep.core.config.schema import OptimConfig

# How many equal parts of [−1, 1] the CPU's quantiser distinguishes.
PARTS = 65536


def next_of_bitsandbytes(
    optim: OptimConfig,
    p: Array,
    grad: Array,
    moments: tuple[Array, Array],
    step: Array,
    lr: Array,
    decay: float,
    quantised: bool,
) -> tuple[tuple[Array, ...], Array, Array]:
    """Compute the new weight's terms and the new moments, float32, from the old ones and the step, counted from 1."""
    double, single = jnp.float64, jnp.float32
    p, grad, m, v, lr = (x.astype(double) for x in (p, grad, *moments, lr))
    beta1, beta2 = optim.beta1, optim.beta2
    m = rounded(rounded(1 - beta1) * grad + rounded(m * rounded(beta1)))
    v = rounded(rounded(rounded(1 - beta2) * grad) * grad + rounded(v * rounded(beta2)))
    first, second = 1 - beta1 ** step.astype(double), jnp.sqrt(1 - beta2 ** step.astype(double))
    kept, root = rounded(p * rounded(1 - lr * decay)), rounded(jnp.sqrt(v))
    m_out, v_out = m.astype(single), v.astype(single)
    if not quantised:
        ratio = rounded(m / rounded(root + rounded(optim.eps * second)))
        return (rounded(rounded(-lr * second / first) * ratio + kept).astype(single),), m_out, v_out
    denominator = rounded(rounded(root / rounded(second)) + rounded(optim.eps))
    move = rounded(rounded(rounded(-lr / first) * m) / denominator)
    terms = kept.astype(single), move.astype(single)
    return terms, in_codes(m_out, signed=True), in_codes(v_out, signed=False)


def rounded(x: Array | float) -> Array:
    """Round x, float64, to the numbers of FP32."""
    return lax.reduce_precision(jnp.asarray(x, jnp.float64), 8, 23)


@cache
def levels_of_parts(signed: bool) -> np.ndarray:
    """Return (65536,) float32: the number on the map (jax_backend/kernels/codes.py) nearest to each part's place."""
    levels, single = quantisation_map(signed), np.float32
    places = single(2) * np.arange(PARTS, dtype=single) / single(PARTS - 1) - single(1)
    return levels[np.searchsorted((levels[1:] + levels[:-1]) / single(2), places)]


def in_codes(x: Array, signed: bool) -> Array:
    """Round x, float32, to what its 8-bit codes and a scale a block of 256 stand for; the last block may be shorter.

    The CPU's quantiser finds the code by 65,536 equal parts of [−1, 1]. None of their places is 0, and the nearest
    to it has a code of its own: a zero comes back as 2.1·10⁻⁵ of its block's largest magnitude, or 1.6·10⁻⁵ without a
    sign, and so does whatever is smaller. A block of zeros stays one.
    """
    flat = x.astype(jnp.float64).reshape(-1)
    blocks = jnp.pad(flat, (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    scale = jnp.abs(blocks).max(1, keepdims=True)
    scaled = jnp.where(scale > 0, rounded(blocks * rounded(1 / scale)), 0.0)
    place = rounded(rounded(rounded(scaled + 1) * (PARTS - 1) / 2) + 0.5)
    parts = jnp.clip(jnp.floor(place), 0, PARTS - 1).astype(jnp.int32)
    back = jnp.asarray(levels_of_parts(signed))[parts] * scale.astype(jnp.float32)
    return back.reshape(-1)[: x.size].reshape(x.shape)
