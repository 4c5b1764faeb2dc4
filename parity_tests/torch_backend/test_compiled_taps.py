"""Compiled, whole or block by block, the program that shows taps computes what the one that trains does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lockstep.core.config.schema import RecomputeConfig
from lockstep.core.model.names import GRADIENT, tap_names
from lockstep.core.parity.evidence.taps import observed_names
from lockstep.parity_tests.faults.planting import backward, swapped
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.model import Block

PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"parts": "block"},
    {"parts": "block", "every": 2},
    {"parts": "block", "keep_products": True},
    {"parts": "norms,attention,mlp,embedding"},
)


def session(scope, backend, plan, policy="bf16", device_gb=None, trainer=TorchBackend):
    torch._dynamo.reset()
    config = tiny_config(policy, True, train={"micro_batch_size": 4})
    compile_ = config.compile.model_copy(update={"scope": scope, "backend": backend})
    parity = config.parity.model_copy(update={} if device_gb is None else {"device_gb": device_gb})
    update = {"compile": compile_, "recompute": RecomputeConfig(**plan), "parity": parity}
    return trainer().open_rank(config.model_copy(update=update))


def streamed(of, batch, names):
    found = {}
    of.stream_taps(batch, names, lambda kind, name, value: found.update({name: value.copy()}))
    return found


def observed_and_trained(of):
    """Return the taps of the tapped program, at once and one after another, and the training program's gradients."""
    batch = text_batch(of.config)
    taps = tap_names(of.config.model)
    names = [*taps, *(GRADIENT + name for name in (*taps, *of.parameters))]
    found, again, trained = of.observe(batch, names), streamed(of, batch, names), of.gradients(batch)
    assert set(taps) <= set(found) and set(again) == set(found)
    assert all(np.array_equal(value, found[name]) for name, value in again.items())
    return found, {GRADIENT + name: grad for name, grad in trained.grads.items()}


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("policy", ["bf16", "fp8_rowwise"])
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_taps_of_a_compiled_run(scope, policy, plan):
    """Without generated code, both programs have the same bits."""
    found, trained = observed_and_trained(session(scope, "aot_eager", plan, policy))
    assert all(np.array_equal(grad, found[name]) for name, grad in trained.items())


class _DoubledAfter(Block):
    def forward(self, *args):
        return backward(super().forward(*args), lambda grad: grad * 2)


class _Doubled(TorchBackend):
    session_class = swapped(Block, _DoubledAfter, "blocks.0")


@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_a_custom_function_that_returns_a_view_of_a_tap(scope):
    """torch.compile would drop the function's backward pass if a recorded tap shared memory with the block's output."""
    found, trained = observed_and_trained(session(scope, "aot_eager", {}, trainer=_Doubled))
    assert all(np.array_equal(grad, found[name]) for name, grad in trained.items())
    honest, _ = observed_and_trained(session(scope, "aot_eager", {}))
    last = GRADIENT + "blocks.0.mlp_residual"
    assert np.array_equal(found[last], 2 * honest[last])


@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_taps_of_generated_code(scope):
    """Inductor fuses another program otherwise: gradients are equal but for FP32 sums in another order."""
    found, trained = observed_and_trained(session(scope, "inductor", {"parts": "block"}, "fp32"))
    for name, grad in trained.items():
        assert np.linalg.norm(grad - found[name]) <= 1e-5 * np.linalg.norm(grad)


@pytest.mark.parametrize("plan", [{}, {"parts": "block"}], ids=str)
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_a_compiled_run_sketches_every_tap(scope, plan):
    of = session(scope, "aot_eager", plan)
    assert set(tap_names(of.config.model)) <= set(of.sketch(text_batch(of.config)))


@pytest.mark.parametrize("plan", [{}, {"parts": "block"}], ids=str)
def test_windows_of_compiled_blocks_show_what_one_pass_does(plan):
    of, within = session("blocks", "aot_eager", plan), session("blocks", "aot_eager", plan, device_gb=1e-4)
    names = observed_names(of.config)
    batch = text_batch(of.config)
    one, other = streamed(of, batch, names), streamed(within, batch, names)
    assert within._sound_windows
    assert set(one) == set(other) and all(np.array_equal(value, other[name]) for name, value in one.items())


def test_a_tap_in_the_place_of_the_models_gets_whole_names(monkeypatch):
    of = session("blocks", "aot_eager", {})
    batch, names = text_batch(of.config), observed_names(of.config)
    alone, passed, micro_loss = of.observe(batch, names), [], of.micro_loss

    def in_front(*inputs):
        shown = of.model.tap

        def tap(name, value):
            passed.append(name)
            return shown(name, value)

        of.model.tap = tap
        return micro_loss(*inputs)

    monkeypatch.setattr(of, "micro_loss", in_front)
    found = of.observe(batch, names)
    assert set(tap_names(of.config.model)) <= set(passed)
    assert set(found) == set(alone) and all(np.array_equal(value, found[name]) for name, value in alone.items())
