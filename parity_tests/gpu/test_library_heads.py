"""Loss heads of libraries on CUDA: near the whole head, and as near their twin as sums in another order are."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lockstep.core.components.loss_heads import LOSS_HEADS
from lockstep.core.config.schema import LossConfig
from lockstep.jax_backend.kernels.library_heads import library_nll
from lockstep.jax_backend.precision import POLICIES as TWIN
from lockstep.torch_backend.kernels.library_heads import library_loss
from lockstep.torch_backend.precision import POLICIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

UNIT = 2.0**-8
TOKENS, VOCABULARY, WIDTH = 512, 1000, 128


def installed(head: str) -> bool:
    package = LOSS_HEADS[head].package
    return hasattr(torch.nn, "LinearCrossEntropyOptions") if package is None else find_spec(package[0]) is not None


@pytest.mark.parametrize("head", ["torch", "liger", "cce"])
def test_a_library_s_head_is_its_twin_and_near_fp64(head):
    if not installed(head):
        pytest.skip(f"the head of {head} is not installed")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, TOKENS, WIDTH), np.float32)
    weight = rng.standard_normal((VOCABULARY, WIDTH), np.float32) / 8
    targets, weights = rng.integers(VOCABULARY, size=(1, TOKENS)), np.ones((1, TOKENS), np.float32)
    settings, total = LossConfig(head=head, chunk=256), torch.tensor(float(TOKENS), dtype=torch.float64, device="cuda")

    leaves = [torch.tensor(a, device="cuda", requires_grad=True) for a in (x, weight)]
    rest = torch.tensor(targets, device="cuda"), torch.tensor(weights, device="cuda"), total
    loss, nll = library_loss(*leaves, *rest, POLICIES["bf16"], settings, lambda _, value: value)
    ours = [t.detach().cpu().double().numpy() for t in (nll, *torch.autograd.grad(loss, leaves))]

    def of(policy, settings):
        stream = TWIN[policy.name].stream
        found, back = jax.vjp(
            lambda x, weight: library_nll(x, weight, jnp.asarray(targets), policy, settings),
            jnp.asarray(x, stream),
            jnp.asarray(weight, stream),
        )
        return [np.asarray(a, np.float64) for a in (found, *back(jnp.full(found.shape, 1 / TOKENS, stream)))]

    twin, truth = of(replace(TWIN["bf16"], kernel="cuda"), settings), of(TWIN["fp64"], settings)
    for one, due in zip(ours, truth, strict=True):
        assert np.linalg.norm(one - due) < 4 * UNIT * np.linalg.norm(due)
    # The twin has most of the error that FP64 shows, but for blocks of tokens that cce adds up as they come.
    for one, mirrored, due in zip(ours, twin, truth, strict=True):
        apart, error = np.linalg.norm(one - mirrored), np.linalg.norm(mirrored - due)
        assert apart < (2.0 if head == "cce" else 0.7) * error
