"""Inputs of a stage enter the stream dtype with every bit that it can hold."""

from __future__ import annotations

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.jax_backend.precision import POLICIES
from lockstep.jax_backend.stages import in_stream

SMALLEST = np.float32(2.0**-149)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("policy", ["bf16", "fp32", "fp64"])
def test_subnormal_numbers_stay(policy: str, dtype: type) -> None:
    """JAX's own cast between FP32 and FP64 gives 0."""
    found = in_stream({"x": np.array([SMALLEST, -3 * SMALLEST], dtype)}, POLICIES[policy])["x"]
    assert found.dtype == POLICIES[policy].stream
    assert found.astype(np.float64).tolist() == [2.0**-149, -3 * 2.0**-149]


def test_a_number_beyond_the_format_is_infinity_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = in_stream({"x": np.array([1e300, -1e300, np.nan])}, POLICIES["fp32"])["x"]
    assert found.tolist()[:2] == [np.inf, -np.inf] and np.isnan(found[2])


def test_a_cast_is_to_the_nearest_and_integers_stay() -> None:
    draw = np.random.default_rng(0).standard_normal(10_000)
    found = in_stream({"x": draw, "tokens": np.arange(3, dtype=np.int32)}, POLICIES["bf16"])
    assert np.array_equal(found["x"], np.asarray(jnp.asarray(draw).astype(jnp.float32)))
    assert found["tokens"].dtype == np.int32
