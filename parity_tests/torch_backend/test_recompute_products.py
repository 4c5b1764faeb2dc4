"""Less is kept for the backward pass, and every bit is plain autograd's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from lockstep.torch_backend import loss
from lockstep.torch_backend.kernels.recompute_products import gated, scaled
from lockstep.torch_backend.loss import negative_log_likelihood

DTYPES = [torch.float32, torch.float64]


def both(recompute, plain, *inputs):
    """Outputs and gradients of either, and the bytes that either keeps beyond its inputs."""
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("recompute", "plain", "shapes"),
    [
        (scaled, lambda x, r, w: x * r * w, [(3, 5, 64), (3, 5, 1), (64,)]),
        (gated, lambda g, u: F.silu(g) * u, [(3, 5, 64), (3, 5, 64)]),
    ],
)
def test_the_same_bits_and_less_kept(recompute, plain, shapes, dtype):
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=draw, dtype=dtype) for shape in shapes]
    (ours, kept), (theirs, plainly) = both(recompute, plain, *inputs)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert kept == 0 and plainly == 3 * 5 * 64 * dtype.itemsize


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
