"""Sketches: one set of signs in numpy, torch and JAX, linear, and a norm that can be trusted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.parity.evidence import sketch as in_numpy
from lockstep.core.parity.evidence.sketch import K
from lockstep.jax_backend.tools import sketch as in_jax
from lockstep.parity_tests.slow_tests import amount
from lockstep.torch_backend.tools import sketch as in_torch

FLOATS = {"float16": 2e-2, "float32": 2e-6, "float64": 1e-13}
# ‖S(x)‖ has a relative deviation of √(1/2K) = 2.2 %; six of them.
SIX_DEVIATIONS = 6 * (1 / (2 * K)) ** 0.5
# Compiled whole: JAX would compile each of their operations for each shape.
jax_signs = jax.jit(in_jax.signs, static_argnums=(0, 1))
jax_sketch = jax.jit(in_jax.sketch, static_argnums=1)
jax_lift = jax.jit(in_jax.lift, static_argnums=1)


@settings(max_examples=amount(8, with_all=80))
@given(
    start=st.integers(0, 5000) | st.integers(2**31 - 3000, 2**31 + 10) | st.integers(2**32 - 50, 2**34),
    count=st.integers(1, 3000),
)
def test_signs_are_bit_equal_beyond_every_word_s_end(start, count):
    signs = in_numpy.signs(start, count)
    assert set(np.unique(signs)) <= {-1, 1}
    assert np.array_equal(signs, in_torch.signs(start, count).numpy())
    assert np.array_equal(signs, np.asarray(jax_signs(start, count)))


def test_signs_are_balanced_along_strides():
    """A multiply-shift hash is regular there, and a column's errors would cancel or add up."""
    signs = in_numpy.signs(0, 1 << 22).astype(np.int64)
    for stride in (1, 2, 3, 64, 1021, 1024, 2048, 4096):
        column = signs[::stride]
        assert abs(column.sum()) < 6 * np.sqrt(len(column)), stride
        assert abs((column[1:] * column[:-1]).sum()) < 6 * np.sqrt(len(column)), stride


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=amount(4, with_all=30))
@given(shape=st.tuples(st.integers(1, 40), st.integers(1, 90)), step=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_all_three_agree_on_any_shape_stride_and_dtype(dtype, shape, step, seed):
    x = np.random.default_rng(seed).standard_normal((shape[0] * step, shape[1])).astype(dtype)[::step].T
    expected = in_numpy.sketch(x)
    assert expected.dtype == (np.float64 if dtype == "float64" else np.float32) and expected.shape == (K,)
    torch_x = torch.from_numpy(np.ascontiguousarray(x.T)).T  # a view that is not contiguous
    scale = FLOATS[dtype] * max(1.0, float(np.abs(expected).max()))
    assert np.abs(in_torch.sketch(torch_x).numpy() - expected).max() <= scale
    assert np.abs(np.asarray(jax_sketch(jnp.asarray(x))) - expected).max() <= scale


def test_bf16_is_sketched_in_fp32():
    x = torch.randn(50, 70, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert in_torch.sketch(x).dtype == torch.float32
    assert np.array_equal(in_torch.sketch(x).numpy(), in_torch.sketch(x.float()).numpy())


@settings(max_examples=amount(6, with_all=40))
@given(size=st.integers(1, 9000), cut=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_linear_and_whole_from_parts(size, cut, seed):
    x, y = np.random.default_rng(seed).standard_normal((2, size))
    at = int(cut * size)
    assert np.allclose(in_numpy.sketch(x) - 3 * in_numpy.sketch(y), in_numpy.sketch(x - 3 * y), atol=1e-10)
    parts = in_numpy.sketch(x[:at]) + in_numpy.sketch(x[at:], offset=at)
    assert np.allclose(parts, in_numpy.sketch(x), atol=1e-10)
    tail = torch.from_numpy(x[at:].copy())
    assert np.allclose(in_torch.sketch(tail, offset=at).numpy(), in_numpy.sketch(x[at:], offset=at), atol=1e-10)


def test_an_offset_beyond_2_to_the_33():
    x = np.random.default_rng(0).standard_normal(5000)
    at = 2**33 + 12345
    expected = np.zeros(K)
    np.add.at(expected, (at + np.arange(5000)) % K, x * in_numpy.signs(at, 5000))
    assert np.allclose(in_numpy.sketch(x, at), expected, atol=1e-10)
    assert np.allclose(in_torch.sketch(torch.from_numpy(x), at).numpy(), expected, atol=1e-10)
    assert np.allclose(np.asarray(jax_sketch(jnp.asarray(x), at)), expected, atol=1e-10)


@settings(max_examples=amount(4, with_all=30))
@given(shape=st.tuples(st.integers(1, 30), st.integers(1, 100)), seed=st.integers(0, 2**31))
def test_lift_is_the_adjoint(shape, seed):
    rng = np.random.default_rng(seed)
    x, probe = rng.standard_normal(shape), rng.standard_normal(K)
    product = float(in_numpy.sketch(x) @ probe)
    for lifted in (
        in_numpy.lift(probe, shape),
        in_torch.lift(torch.from_numpy(probe), shape).numpy(),
        np.asarray(jax_lift(jnp.asarray(probe), shape)),
    ):
        assert float((x * lifted).sum()) == pytest.approx(product, rel=1e-9, abs=1e-9)


def test_the_gradient_of_a_probe_is_the_sketch_of_the_gradient():
    weights = np.random.default_rng(0).standard_normal((30, 50))
    probe = torch.zeros(K, dtype=torch.float64, requires_grad=True)
    x = torch.ones(30, 50, dtype=torch.float64) + in_torch.lift(probe, (30, 50))
    (x * torch.from_numpy(weights)).sum().backward()
    assert np.allclose(probe.grad.numpy(), in_numpy.sketch(weights), atol=1e-12)
    grad = jax.jit(jax.grad(lambda p: ((1.0 + in_jax.lift(p, (30, 50))) * weights).sum()))(jnp.zeros(K))
    assert np.allclose(np.asarray(grad), in_numpy.sketch(weights), atol=1e-12)


def test_a_table_of_signs_gives_the_same_sketch():
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    table = in_torch.sign_table(x.numel(), x.device)
    assert np.array_equal(in_torch.sketch(x, table=table).numpy(), in_torch.sketch(x).numpy())
    probe = torch.randn(K)
    assert np.array_equal(in_torch.lift(probe, (200, 300), table).numpy(), in_torch.lift(probe, (200, 300)).numpy())


def errors(rows: int, columns: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {name: np.zeros((rows, columns)) for name in ("one row", "one column", "one head", "one stride")}
    found["one row"][7] = rng.standard_normal(columns)
    found["one column"][:, 5] = rng.standard_normal(rows)
    found["one head"][:, 64:128] = rng.standard_normal((rows, 64))
    found["one stride"].reshape(-1)[::1024] = rng.standard_normal(found["one stride"].size // 1024)
    return found | {"dense": rng.standard_normal((rows, columns))}


@pytest.mark.parametrize("kind", ["dense", "one row", "one column", "one head", "one stride"])
def test_the_norm_of_any_error_is_estimated(kind):
    error = errors(1024, 2048)[kind]
    estimated = np.linalg.norm(in_numpy.sketch(error)) / np.linalg.norm(error)
    assert abs(estimated - 1) <= SIX_DEVIATIONS


def test_1024_buckets_lose_a_column():
    """The negative twin: why K is prime. All of a column's coordinates fall into one bucket."""
    error = errors(1024, 2048)["one column"]
    signed = error * in_numpy.signs(0, error.size).reshape(error.shape)
    estimated = np.linalg.norm(signed.reshape(-1, 1024).sum(0)) / np.linalg.norm(error)
    assert abs(estimated - 1) > SIX_DEVIATIONS


def test_compiled_equals_eager():
    torch._dynamo.reset()
    x = torch.randn(333, 77, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(in_torch.sketch, fullgraph=True, dynamic=False)
    assert np.abs(compiled(x).numpy() - in_torch.sketch(x).numpy()).max() <= 2e-5
