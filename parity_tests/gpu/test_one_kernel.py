"""The head's Triton kernels on CUDA, where threads race: within the bounds of the FP64 path, in place and beside it."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from lockstep.core.parity.measures.calibrated_bounds import measures
from lockstep.core.parity.measures.distances import distances
from lockstep.torch_backend.kernels import one_kernel
from lockstep.torch_backend.loss import logits_gradient, losses_and_logsumexp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
]

ROWS = 1024


def within_an_ulp(one, other, unit=1.0):
    """Return whether all are off by an ulp at most, or by the FP64 roundings of numbers of the size of `unit`.

    The loss of a token that is as good as certain is what is left of a difference of such numbers.
    """
    apart, ulp = (one.double() - other.double()).abs(), torch.finfo(one.dtype).eps
    return bool((apart <= ulp * other.double().abs() + 8 * torch.finfo(torch.float64).eps * unit).all())


def of_fp64_path(logits, targets, shares):
    losses, logsumexp = losses_and_logsumexp(logits, targets, 0.0)
    return losses, logits_gradient(logits, targets, logsumexp, shares, 0.0)


@pytest.mark.parametrize("held", [True, False], ids=["held", "again"])
@pytest.mark.parametrize("vocabulary", [259, 16_384, 50_257, 131_072])
def test_losses_and_gradients_are_within_the_bounds(vocabulary, held, monkeypatch):
    if not held:
        monkeypatch.setattr(one_kernel, "HELD", 0)
    elif one_kernel.readings(vocabulary, torch.device("cuda")) > 1:
        pytest.skip("no cluster of this GPU, or of this Triton, holds such a row")
    generator = torch.Generator("cuda").manual_seed(0)
    logits = 3 * torch.randn(ROWS, vocabulary, generator=generator, device="cuda")
    targets = torch.randint(vocabulary, (ROWS,), generator=generator, device="cuda")
    logits[torch.arange(0, ROWS, 2), targets[::2]] += 30
    shares = torch.rand(ROWS, generator=generator, device="cuda") / ROWS
    ours = one_kernel.losses_and_shown_gradient(logits, targets, shares, 0.0)
    twin = of_fp64_path(logits, targets, shares)
    some = slice(0, 32)
    truth = of_fp64_path(logits[some].double(), targets[some], shares[some].double())
    for kind, c, w, t in zip(("forward/nll", "backward/nll/logits"), ours, twin, truth, strict=True):
        d = distances(*(a.cpu().double().numpy() for a in (c[some], w[some], t)), np.float32)
        assert all(measure.ok for measure in measures("fp32/eager", kind, d, t.numel()))
    for operand in (torch.bfloat16, torch.float32):
        losses, grad = one_kernel.losses_and_gradient(logits.clone(), targets, shares, 0.0, operand)
        # Another format to write is another program, whose FP64 sums have another order: now and then a last bit.
        assert within_an_ulp(losses, ours[0], logits.abs().max().item())
        assert within_an_ulp(grad, ours[1].to(operand), shares[:, None].double())
        assert (grad != ours[1].to(operand)).float().mean().item() < 0.01
        again = one_kernel.losses_and_gradient(logits.clone(), targets, shares, 0.0, operand)
        assert torch.equal(losses, again[0]) and torch.equal(grad, again[1])
