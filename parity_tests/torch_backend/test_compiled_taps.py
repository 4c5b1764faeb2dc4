"""Compiled, whole or block by block, the program that shows taps computes what the one that trains does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lockstep.core.config.schema import RecomputeConfig
from lockstep.core.model.names import GRADIENT, tap_names
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend

PLANS = (
    {},
    {"parts": "block"},
    {"parts": "block", "every": 2},
    {"parts": "block", "keep_products": True},
    {"parts": "norms,attention,mlp,embedding"},
)


def session(scope, backend, plan, policy="bf16", device_gb=None):
    torch._dynamo.reset()
    config = tiny_config(policy, True, train={"micro_batch_size": 4})
    compile_ = config.compile.model_copy(update={"scope": scope, "backend": backend})
    parity = config.parity.model_copy(update={} if device_gb is None else {"device_gb": device_gb})
    update = {"compile": compile_, "recompute": RecomputeConfig(**plan), "parity": parity}
    return TorchBackend().open_rank(config.model_copy(update=update))


def streamed(of, batch, names):
    found = {}
    of.stream_taps(batch, names, lambda kind, name, value: found.update({name: value.copy()}))
    return found


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("policy", ["bf16", "fp8_rowwise"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_taps_of_a_compiled_run(scope, backend, policy, plan):
    of = session(scope, backend, plan, policy)
    batch = text_batch(of.config)
    taps = tap_names(of.config.model)
    names = [*taps, *(GRADIENT + name for name in (*taps, *of.parameters))]
    found = of.observe(batch, names)
    assert set(taps) <= set(found)
    trained = of.gradients(batch)
    assert all(np.array_equal(grad, found[GRADIENT + name]) for name, grad in trained.grads.items())
    again = streamed(of, batch, names)
    assert set(again) == set(found) and all(np.array_equal(value, found[name]) for name, value in again.items())
    assert set(taps) <= set(of.sketch(batch))


@pytest.mark.parametrize("plan", [{}, {"parts": "block"}], ids=str)
def test_windows_of_compiled_blocks_show_what_one_pass_does(plan):
    of, within = session("blocks", "aot_eager", plan), session("blocks", "aot_eager", plan, 1e-4)
    taps = tap_names(of.config.model)
    names = [*taps, *(GRADIENT + name for name in taps)]
    batch = text_batch(of.config)
    one, other = streamed(of, batch, names), streamed(within, batch, names)
    assert within._sound_windows
    assert set(one) == set(other) and all(np.array_equal(value, other[name]) for name, value in one.items())
