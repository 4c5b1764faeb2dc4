"""Cross-entropy of FP32 logits is right to the last bit, in both backends, where plain FP32 arithmetic is not.

Against 50-digit arithmetic would be slower and say the same: FP64 is exact to 1e-12 here, the bound is 2.4e-7.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.jax_backend import loss as in_jax
from lockstep.torch_backend import loss as in_torch

BOUND = 4 * 2.0**-24


def exact(logits: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """NLL and its gradient in FP64, the maximum's own term left out of the sum."""
    wide = logits.astype(np.float64)
    rows = np.arange(len(wide))
    top = wide.argmax(-1)
    shifted = np.exp(wide - wide[rows, top][:, None])
    shifted[rows, top] = 0.0
    rest = shifted.sum(-1)
    nll = np.log1p(rest) + (wide[rows, top] - wide[rows, targets])
    shifted[rows, top] = 1.0
    softmax = shifted / (1.0 + rest)[:, None]
    softmax[rows, targets] -= 1.0
    return nll, softmax


def torch_nll(logits: np.ndarray, targets: np.ndarray, compiled: bool = False) -> tuple[np.ndarray, np.ndarray]:
    def both(x, t):
        nll = in_torch.negative_log_likelihood(x, t)
        return nll, nll.sum()

    leaf = torch.from_numpy(logits[None].copy()).requires_grad_()
    function = torch.compile(both, fullgraph=True, dynamic=False) if compiled else both
    nll, total = function(leaf, torch.from_numpy(targets[None].astype(np.int64)))
    total.backward()
    assert leaf.grad is not None
    return nll.detach().numpy()[0], leaf.grad.numpy()[0]


def jax_nll(logits: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    def total(x):
        nll = in_jax.negative_log_likelihood(x, jnp.asarray(targets[None]))
        return nll.sum(), nll

    (_, nll), grad = jax.jit(jax.value_and_grad(total, has_aux=True))(jnp.asarray(logits[None]))
    return np.asarray(nll)[0], np.asarray(grad)[0]


def compiled_nll(logits: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return torch_nll(logits, targets, compiled=True)


def errors(found: tuple[np.ndarray, np.ndarray], logits: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
    """NLL's error in units of its bound, gradient's too: both at most 1."""
    nll, grad = exact(logits, targets)
    of_nll = np.abs(found[0] - nll) / (BOUND * np.maximum(1.0, np.abs(nll)))
    return float(of_nll.max()), float(np.abs(found[1] - grad).max() / BOUND)


def confident(vocabulary: int, nll: float, rows: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Logits of noise whose target's likelihood is exp(−nll)."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.standard_normal((rows, vocabulary)).astype(np.float32)
    targets = rng.integers(0, vocabulary, rows).astype(np.int32)
    logits[np.arange(rows), targets] = np.log(np.exp(logits.astype(np.float64)).sum(-1) / np.expm1(nll))
    return logits, targets


def spread(vocabulary: int, scale: float, rows: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([vocabulary, int(scale)])
    logits = rng.uniform(-scale, scale, (rows, vocabulary)).astype(np.float32)
    return logits, rng.integers(0, vocabulary, rows).astype(np.int32)


def alike(vocabulary: int, rows: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """All logits but one alike, at a value where the difference to the maximum must be rounded in FP32."""
    logits = np.full((rows, vocabulary), 0.1, np.float32)
    logits[:, 3] = np.linspace(10.05, 10.95, rows)
    return logits, np.full(rows, 3, np.int32)


CASES = {
    **{f"V {v}, NLL {nll:g}": confident(v, nll) for v in (2, 1021, 50257) for nll in (1e-6, 5.5e-4, 3.0)},
    **{f"V {v}, logits to {scale:g}": spread(v, scale) for v in (7, 4097) for scale in (1.0, 30.0, 1e4)},
    **{f"V {v}, alike": alike(v) for v in (50257, 131072)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", [torch_nll, jax_nll], ids=["torch", "jax"])
def test_each_token_is_within_4_half_ulp(implementation, case):
    of_nll, of_gradient = errors(implementation(*CASES[case]), *CASES[case])
    assert of_nll <= 1 and of_gradient <= 1


@pytest.mark.parametrize("case", ["V 1021, NLL 1e-06", "V 4097, logits to 10000", "V 50257, alike"])
def test_the_compiled_one_too(case):
    torch._dynamo.reset()
    of_nll, of_gradient = errors(compiled_nll(*CASES[case]), *CASES[case])
    assert of_nll <= 1 and of_gradient <= 1


def test_plain_fp32_cross_entropy_is_2_percent_off_for_confident_tokens():
    """The negative twin: the cases tell a right implementation from a common one."""
    logits, targets = confident(50257, 5.5e-4)
    nll = F.cross_entropy(torch.from_numpy(logits), torch.from_numpy(targets.astype(np.int64)), reduction="none")
    true, _ = exact(logits, targets)
    assert np.abs(nll.numpy() / true - 1).max() > 1e-4
    right = torch_nll(logits, targets)[0]
    assert np.abs(right / true - 1).max() < 1e-6


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.integers(2, 3000),
    scale=st.floats(1e-3, 1e4),
    shift=st.floats(-1e4, 1e4),
    seed=st.integers(0, 2**31),
)
def test_any_logits(vocabulary, scale, shift, seed):
    rng = np.random.default_rng(seed)
    logits = (shift + scale * rng.standard_normal((4, vocabulary))).astype(np.float32)
    targets = rng.integers(0, vocabulary, 4).astype(np.int32)
    targets[0] = logits[0].argmax()
    of_nll, of_gradient = errors(torch_nll(logits, targets), logits, targets)
    assert of_nll <= 1 and of_gradient <= 1


def test_the_mean_is_accumulated_in_fp64():
    """A million equal losses: an FP32 sum in order drifts, an FP64 one does not."""
    nll = torch.full((1000, 1000), 0.1, dtype=torch.float32)
    weights = torch.ones_like(nll)
    total = torch.tensor(1e6, dtype=torch.float64)
    exact_mean = float(np.float32(0.1))
    assert float(in_torch.weighted_mean(nll, weights, total)) == pytest.approx(exact_mean, rel=1e-12)
    found = in_jax.weighted_mean(jnp.asarray(nll.numpy()), jnp.asarray(weights.numpy()), jnp.asarray(1e6))
    assert float(found) == pytest.approx(exact_mean, rel=1e-12)


def test_a_logit_that_is_not_finite_is_not_hidden():
    logits, targets = spread(7, 1.0, rows=3)
    logits[1, 2] = np.nan
    assert np.isnan(torch_nll(logits, targets)[0][1]) and np.isnan(jax_nll(logits, targets)[0][1])
