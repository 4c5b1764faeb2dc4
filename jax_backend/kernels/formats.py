"""Floating formats narrower than FP32, and rounding to them in place: values change, the dtype does not.

XLA may remove a pair of converts; `lax.reduce_precision`, which it may not, supports neither subnormal numbers nor
e4m3.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax


@dataclass(frozen=True)
class Format:
    """A narrow floating-point format.

    mantissa: stored bits. least: exponent of the smallest normal number. largest: the largest finite number.
    """

    mantissa: int
    least: int
    largest: float


BF16 = Format(7, -126, 3.3895313892515355e38)
FP16 = Format(10, -14, 65504.0)
TF32 = Format(10, -126, 3.4011621342146535e38)
E4M3 = Format(3, -6, 448.0)  # OCP FP8: no infinity
E5M2 = Format(2, -14, 57344.0)


def rounded(x: Array, form: Format) -> Array:
    """Round x to the nearest number of a format, ties to even, with subnormals; above the largest number, infinity."""
    normal = lax.reduce_precision(x, 8, form.mantissa)
    if form.least == -126:  # FP32's own range: reduce_precision overflows as the format does
        return normal
    step = 2.0 ** (form.least - form.mantissa)
    tiny = lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step
    found = jnp.where(jnp.abs(x) < 2.0**form.least, tiny, normal)
    return jnp.where(jnp.abs(found) > form.largest, jnp.copysign(jnp.inf, found), found)
