"""The twin's rounding to bf16 is torch's and ml_dtypes', bit for bit."""

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from lockstep.jax_backend.precision import POLICIES
from lockstep.parity_tests.tiny import tiny_config


def by_torch(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).bfloat16().float().numpy()


def by_ml_dtypes(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def from_bits(bits) -> np.ndarray:
    return np.asarray(bits, np.uint32).view(np.float32)


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint32)


def every_kind() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    upper = np.arange(2**16, dtype=np.uint32) << 16  # every bf16 number
    finite = upper[np.isfinite(from_bits(upper))]
    anything = random.integers(0, 2**32, 200_000, dtype=np.uint32)
    subnormal = random.integers(1, 2**23, 20_000, dtype=np.uint32)
    return {
        "exact": from_bits(finite),
        "ties": from_bits(finite | 0x8000),  # half-way: to even, and from the largest to infinity
        "just below a tie": from_bits(finite | 0x7FFF),
        "just above a tie": from_bits(finite | 0x8001),
        "random bits": from_bits(anything[np.isfinite(from_bits(anything))]),
        "subnormal": from_bits(np.concatenate((subnormal, subnormal | 0x80000000))),
        "normal": random.standard_normal(100_000).astype(np.float32),
        "zeros and infinities": np.array([0.0, -0.0, np.inf, -np.inf], np.float32),
    }


@pytest.mark.parametrize("kind", every_kind())
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_rounding_is_torch_s_and_ml_dtypes(kind, compiled):
    x = every_kind()[kind]
    rounded = jax.jit(POLICIES["bf16"].round) if compiled else POLICIES["bf16"].round
    ours = np.array(rounded(x))
    assert ours.dtype == np.float32
    assert np.array_equal(bits(ours), bits(by_torch(x)))
    assert np.array_equal(bits(ours), bits(by_ml_dtypes(x)))


def test_nan_stays_nan():
    assert np.isnan(np.array(POLICIES["bf16"].round(np.array([np.nan, -np.nan], np.float32)))).all()


def test_ties_are_there_and_go_to_even():
    """The negative twin: rounding half away from zero, or cutting off, differs on every other of these ties."""
    x = np.array([1.0 + 2**-8, 1.0 + 3 * 2**-8], np.float32)
    assert by_torch(x).tolist() == [1.0, 1.0 + 2**-6]
    assert np.array(POLICIES["bf16"].round(x)).tolist() == [1.0, 1.0 + 2**-6]
    assert from_bits(bits(x) & 0xFFFF0000).tolist() != by_torch(x).tolist()


@pytest.mark.parametrize("policy", ["fp32", "fp64"])
def test_other_policies_round_nothing(policy):
    x = np.random.default_rng(0).standard_normal(100)
    assert tiny_config(policy).precision.policy == policy
    assert np.array_equal(POLICIES[policy].round(x), x)
