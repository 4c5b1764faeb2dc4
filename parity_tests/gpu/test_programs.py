"""Compiled programs on CUDA: one graph each, and CUDA graphs that accumulate are the plain program."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from lockstep.core.config.schema import AttentionConfig, CompileConfig, LossConfig
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.attention import Machine, refusal
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.kernels.float8 import FIRST_CAPABILITY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MICRO_BATCHES = 4


@pytest.fixture(autouse=True)
def compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def on_cuda(policy="bf16", head="chunked", kernel="auto", **compile):
    config = tiny_config(policy, hidden=256, train={"batch_size": 2 * MICRO_BATCHES, "micro_batch_size": 2})
    program = CompileConfig(**{"enabled": True, "backend": "inductor"} | compile)
    changed = {"device": "cuda", "compile": program, "loss": LossConfig(head=head, chunk=48)}
    return config.model_copy(update=changed | {"attention": AttentionConfig(kernel=kernel)})


def close(found, due, bound):
    np.testing.assert_allclose(found.nll, due.nll, rtol=0, atol=bound)
    for name, grad in due.grads.items():
        assert np.linalg.norm(found.grads[name] - grad) <= bound * np.linalg.norm(grad), name


@pytest.mark.parametrize("head", ["full", "chunked"])
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_cuda_graphs_accumulate_as_the_plain_program_does(head, scope):
    """Call after call: a graph is warmed up, recorded, then replayed. Micro-batches weigh differently."""
    config = on_cuda(head=head, scope=scope, mode="reduce-overhead")
    plain = TorchBackend().open(on_cuda(head=head, scope=scope))
    eager = TorchBackend().open(on_cuda(head=head, enabled=False))
    replayed = TorchBackend().open(config)
    assert config.train.accumulation == MICRO_BATCHES and replayed.replays
    for seed in range(5):
        batch = uneven_weights(text_batch(config, seed), seed)
        found = replayed.gradients(batch)
        close(found, plain.gradients(batch), 1e-3)
        close(found, eager.gradients(batch), 0.05)


def test_steps_through_cuda_graphs_train_as_those_without():
    """Weights change under the graph, and gradients of one step do not stay for the next."""
    config = on_cuda(mode="reduce-overhead")
    replayed, plain = TorchBackend().open(config), TorchBackend().open(on_cuda())
    for step in range(6):
        batch = text_batch(config, step)
        one, other = replayed.step(batch, norms=step == 3), plain.step(batch, norms=step == 3)
        assert one.loss == pytest.approx(other.loss, rel=1e-3)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-2)


def test_micro_batches_are_not_the_same():
    """Else a graph that returned one result for all would not be seen."""
    config = on_cuda(enabled=False)
    session = TorchBackend().open(config)
    first, second, *_ = text_batch(config).micro_batches(2)
    one, other = session.gradients(first), session.gradients(second)
    name = "blocks.1.mlp.down_proj.weight"
    assert np.linalg.norm(one.grads[name] - other.grads[name]) > 0.1 * np.linalg.norm(one.grads[name])


PROGRAMS = {
    "bf16": {},
    "fp16": {"policy": "fp16"},
    "tf32": {"policy": "tf32"},
    "fp8_tensorwise": {"policy": "fp8_tensorwise"},
    "fp8_rowwise": {"policy": "fp8_rowwise"},
    "fp8_delayed": {"policy": "fp8_delayed"},
    "full head": {"head": "full"},
    "flex": {"kernel": "flex"},
    "cudnn": {"kernel": "cudnn"},
    "blocks": {"scope": "blocks"},
    "graphs": {"mode": "reduce-overhead"},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_graph_breaks_and_nothing_is_compiled_twice(name):
    config = on_cuda(**PROGRAMS[name])
    if config.precision.fp8 and torch.cuda.get_device_capability() < FIRST_CAPABILITY:
        pytest.skip("no FP8 tensor cores")
    if why := refusal(config.attention, config.model.head_dim, torch.bfloat16, Machine.of(torch.device("cuda"))):
        pytest.skip(why)
    session = TorchBackend().open(config)
    session.step(text_batch(config))
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == (1 if config.compile.scope == "model" else 2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(3):
            session.step(text_batch(config, step))
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "inductor"])
@pytest.mark.parametrize(("policy", "bound"), [("fp32", 1e-5), ("bf16", 0.02), ("fp16", 0.005)])
def test_the_chunked_head_is_the_full_one(policy, bound, compiled):
    """128 tokens in chunks of 48: the last one is shorter."""
    full, chunked = (TorchBackend().open(on_cuda(policy, head=head, enabled=compiled)) for head in ("full", "chunked"))
    batch = uneven_weights(text_batch(full.config), 0)
    close(chunked.gradients(batch), full.gradients(batch), bound)
