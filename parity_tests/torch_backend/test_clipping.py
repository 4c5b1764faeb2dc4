"""The step clips as `torch.nn.utils.clip_grad_norm_` does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep.core.config.schema import OptimConfig
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.optim import clip_coefficient

# The gradient's norm is near 2: below, above, and off.
LIMITS = [0.25, 1e3, 0.0]


@pytest.mark.parametrize("limit", LIMITS)
def test_gradients_are_clipped_as_torch_clips_them(limit):
    config = tiny_config("fp64", train={"sequence_length": 16})
    config = config.model_copy(update={"optim": OptimConfig(clip_norm=limit)})
    session, batch = TorchBackend().open(config), text_batch(config)
    found = session.gradients(batch)
    for name, p in session.parameters.items():
        p.grad = torch.tensor(found.grads[name])
    norm = torch.nn.utils.clip_grad_norm_(session.parameters.values(), limit or torch.inf)
    expected = {name: p.grad.numpy().copy() for name, p in session.parameters.items() if p.grad is not None}
    record = session.step(batch)
    assert record.grad_norm == pytest.approx(norm.item(), rel=1e-14)
    assert (record.clip_coefficient < 1) == (limit == 0.25)
    for name, moment in session.state().optimizer["exp_avg"].items():
        np.testing.assert_allclose(moment, (1 - config.optim.beta1) * expected[name], rtol=1e-13)


def test_coefficient_by_its_formula():
    for norm, expected in [(0.0, 1.0), (0.4, 1.0), (0.5, 0.5 / 0.500001), (8.0, 0.5 / 8.000001)]:
        found = clip_coefficient(OptimConfig(clip_norm=0.5), torch.tensor(norm, dtype=torch.float64))
        assert found.item() == pytest.approx(expected, rel=1e-15)
