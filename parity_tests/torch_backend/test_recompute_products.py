"""Kernels of eager mode keep less for the backward pass, and every bit is plain autograd's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from lockstep.torch_backend import loss
from lockstep.torch_backend.kernels.recompute_products import gated, rms_norm
from lockstep.torch_backend.kernels.rotary import rotated
from lockstep.torch_backend.loss import (
    logits_gradient,
    losses_and_gradient,
    losses_and_logsumexp,
    negative_log_likelihood,
)

DTYPES = [torch.float32, torch.float64]
EPS = 1e-5


def both(recompute, plain, *inputs):
    """Return outputs and gradients of both, and the bytes that each keeps beyond its inputs."""
    found = []
    for function in (recompute, plain):
        kept = {}
        leaves = [x.clone().requires_grad_() for x in inputs]
        own = {x.data_ptr() for x in leaves}

        def keep(x, kept=kept, own=own):
            if x.data_ptr() not in own:
                kept[x.data_ptr()] = x.nbytes
            return x

        with saved_tensors_hooks(keep, lambda x: x):
            out = function(*leaves)
        weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
        found.append(([out, *torch.autograd.grad(out, leaves, weights)], sum(kept.values())))
    return found


def plain_norm(x, gain):
    return x * torch.rsqrt(torch.square(x).mean(-1, keepdim=True) + EPS) * gain


def plain_rotation(x, cos, sin):
    left, right = torch.chunk(x, 2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def normal(*shapes, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize(
    ("ours", "plain", "shapes", "numbers_kept"),
    [
        # Plain autograd keeps x · scale beside the scale of each row; and silu(gate).
        (lambda x, gain: rms_norm(x, gain, EPS), plain_norm, [(3, 5, 64), (64,)], (15, 15 + 3 * 5 * 64)),
        (gated, lambda gate, up: F.silu(gate) * up, [(3, 5, 64), (3, 5, 64)], (0, 3 * 5 * 64)),
    ],
)
def test_the_same_bits_and_less_kept(ours, plain, shapes, numbers_kept, dtype):
    (found, kept), (expected, plainly) = both(ours, plain, *normal(*shapes, dtype=dtype))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert (kept, plainly) == tuple(numbers * dtype.itemsize for numbers in numbers_kept)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_tables", [(5, 1, 8), (3, 5, 1, 8)])
def test_a_rotation_has_the_same_bits(of_tables, dtype):
    x, cos, sin = normal((3, 5, 2, 16), of_tables, of_tables, dtype=dtype)
    (found, _), (expected, _) = both(lambda x: rotated(x, cos, sin), lambda x: plain_rotation(x, cos, sin), x)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_narrow_input_of_wide_tables_keeps_its_two_roundings():
    (x,) = normal((3, 5, 2, 16), dtype=torch.bfloat16)
    cos, sin = normal((5, 1, 8), (5, 1, 8))
    (found, _), (expected, _) = both(lambda x: rotated(x, cos, sin), lambda x: plain_rotation(x, cos, sin), x)
    assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("z_loss", [0.0, 0.5])
@pytest.mark.parametrize("at_a_time", [1, 500, 1300])
def test_the_loss_has_the_bits_of_whole_logits(at_a_time, z_loss, dtype, monkeypatch):
    logits = (5 * torch.randn(2, 7, 259, generator=torch.Generator().manual_seed(0))).to(dtype)
    targets = torch.arange(14).view(2, 7) * 18
    grads = torch.linspace(0, 1, 14, dtype=dtype).view(2, 7)

    def run():
        leaf = logits.clone().requires_grad_()
        nll = negative_log_likelihood(leaf, targets, z_loss)
        return nll.detach(), *torch.autograd.grad(nll, leaf, grads), leaf.detach()

    monkeypatch.setattr(loss, "AT_A_TIME", at_a_time)
    blocks = run()
    monkeypatch.setattr(loss, "_is_whole", lambda logits: True)
    whole = run()
    assert all(torch.equal(one, other) for one, other in zip(blocks, whole, strict=True))
    assert torch.equal(blocks[2], logits)  # FP64 logits are not widened in place


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("size", [0.1, 5.0, 60.0])
def test_losses_and_gradient_of_one_exponential_are_those_of_two(size, dtype, z_loss, overwrite, monkeypatch):
    """They differ by a rounding of the result, and of the exponent in FP64."""
    (logits,) = normal((14, 259), dtype=dtype)
    logits *= size
    targets, grads = torch.arange(14) * 18, torch.linspace(-1, 1, 14, dtype=dtype)
    logits[0, targets[0]] = 50 * logits.abs().max()
    losses, logsumexp = losses_and_logsumexp(logits, targets, z_loss)
    gradient = logits_gradient(logits, targets, logsumexp, grads, z_loss)
    monkeypatch.setattr(loss, "AT_A_TIME", 500)
    given = logits.clone()
    found, of_logits = losses_and_gradient(given, targets, grads, z_loss, overwrite)
    assert found.dtype == losses.dtype and of_logits.dtype == dtype
    assert (of_logits is given) == overwrite and (overwrite or torch.equal(given, logits))
    ulp, exponent = torch.finfo(dtype).eps, 4 * torch.finfo(torch.float64).eps * (1 + logsumexp.abs())
    torch.testing.assert_close(found, losses, rtol=torch.finfo(losses.dtype).eps, atol=float(exponent.max()))
    off = (of_logits.double() - gradient.double()).abs()
    allowed = exponent * (1 + 2 * z_loss * logsumexp.abs()) * grads.double().abs()
    assert (off <= ulp * gradient.double().abs() + allowed[:, None]).all()
