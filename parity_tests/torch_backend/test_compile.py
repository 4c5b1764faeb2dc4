"""The trained program is one whole graph, compiled once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from torch._inductor import codecache, cpu_vec_isa

from lockstep.core.backend import Batch
from lockstep.core.parity.evidence.loss_weights import uneven_weights
from lockstep.core.parity.evidence.taps import observed_names
from lockstep.core.sinks.phrases import metric_lines
from lockstep.core.train.metrics import RECOMPILED
from lockstep.parity_tests.tiny import text_batch, tiny_config
from lockstep.torch_backend.backend import TorchBackend
from lockstep.torch_backend.tools import compile_ahead
from lockstep.torch_backend.tools.compile_time import COMPILE_TIME

CONFIG = tiny_config("bf16", compiled=True, layers=1, train={"sequence_length": 32})
# Each with the number of programs of a step. Blocks share one, and the head has another.
SCOPES = [("model", 1), ("blocks", 2)]


@pytest.fixture
def graphs():
    """How many graphs dynamo has compiled since the test began."""
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.mark.parametrize("scope, programs", SCOPES)
def test_each_program_is_compiled_once(graphs, scope, programs):
    config = CONFIG.model_copy(update={"compile": CONFIG.compile.model_copy(update={"scope": scope})})
    session = TorchBackend().open(config)
    assert graphs() == 0
    session.gradients(text_batch(CONFIG))
    assert graphs() == programs
    with torch._dynamo.config.patch(error_on_recompile=True):
        session.gradients(uneven_weights(text_batch(CONFIG, 1), 1))
        for step in range(3):
            session.step(text_batch(CONFIG, step), norms=step == 1)
        session.load(session.state())
        for policy in (None, "fp32"):
            session.evaluate(text_batch(CONFIG), policy)
        for length in (3, 4):
            session.next_token_logits(text_batch(CONFIG).tokens[0, :length])
        session.gradients(text_batch(CONFIG))
    assert graphs() == programs
    assert not counters["graph_break"]


@pytest.mark.parametrize("fails", [False, True])
def test_pythons_collector_is_off_while_a_program_is_compiled_and_no_longer(graphs, fails):
    found = []

    def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        found.append(gc.isenabled())
        if fails:
            raise ValueError
        return module.forward

    COMPILE_TIME.count()
    program = torch.compile(torch.sin, backend=backend, fullgraph=True)
    with pytest.raises(BackendCompilerFailed) if fails else nullcontext():
        program(torch.ones(2))
    assert found == [False]
    assert gc.isenabled()


def test_results_that_the_compiler_needs_once_a_process_are_computed_when_a_session_opens(monkeypatch):
    asked = []
    monkeypatch.setattr(codecache.torch_key, "prefetch", lambda: asked.append("torch_key"), raising=False)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: asked.append("instructions"))
    compile_ahead.begin.cache_clear()
    config = CONFIG.model_copy(update={"compile": CONFIG.compile.model_copy(update={"backend": "inductor"})})
    TorchBackend().open(config)
    for thread in threading.enumerate():
        if thread.name == compile_ahead.THREAD:
            thread.join()
    assert sorted(asked) == ["instructions", "torch_key"]
    asked.clear()
    compile_ahead.begin("cuda")
    assert asked == ["torch_key"]


@pytest.mark.parametrize("scope, programs", SCOPES)
def test_a_recompilation_of_the_step_is_counted_and_said(graphs, scope, programs):
    config = CONFIG.model_copy(update={"compile": CONFIG.compile.model_copy(update={"scope": scope})})
    session = TorchBackend().open(config)
    session.observe(text_batch(config).micro_batches(2)[0], ["embed"])
    assert RECOMPILED not in session.step(text_batch(config)).metrics
    assert session.programs == programs
    assert RECOMPILED not in session.step(text_batch(config, 1)).metrics
    batch = text_batch(config)
    short = Batch(*(x[:, :16].copy() for x in (batch.tokens, batch.targets, batch.weights)))
    metrics = session.step(short).metrics
    assert metrics[RECOMPILED] == programs
    said = f"step 3: recompiled: torch.compile made the step's program anew ({programs})"
    assert metric_lines(3, metrics, {}) == [said]
    assert metric_lines(4, session.step(short).metrics, metrics) == []


@pytest.mark.parametrize("look", ["evaluate", "next_token_logits", "attention_logits"])
def test_what_is_compiled_elsewhere_stays_so_while_blocks_run_eagerly(graphs, look):
    """FlexAttention, run eagerly, would write out its scores."""
    config = CONFIG.model_copy(update={"compile": CONFIG.compile.model_copy(update={"scope": "blocks"})})
    session, batch = TorchBackend().open(config), text_batch(config)
    own = session.model.trunk
    other = torch.compile(lambda x: x + 1, backend="eager")

    def trunk(*arguments):
        other(torch.ones(3))
        return own(*arguments)

    session.model.trunk = trunk
    getattr(session, look)(batch.tokens[0] if look == "next_token_logits" else batch)
    assert graphs() == 1


def test_another_shape_is_another_graph(graphs):
    """The negative twin: the counter counts, and `dynamic=False` makes no graph for every shape."""
    session = TorchBackend().open(CONFIG)
    batch = text_batch(CONFIG)
    session.gradients(batch)
    session.gradients(Batch(*(x[:, :16].copy() for x in (batch.tokens, batch.targets, batch.weights))))
    assert graphs() == 2


def test_a_graph_break_is_an_error(graphs, monkeypatch):
    """fullgraph: what cannot be traced is not silently left to eager."""
    session = TorchBackend().open(CONFIG)
    trunk = session.model.trunk

    def broken(*inputs):
        torch._dynamo.graph_break()
        return trunk(*inputs)

    monkeypatch.setattr(session.model, "trunk", broken)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        session.gradients(text_batch(CONFIG))


def test_compile_off_compiles_nothing(graphs):
    TorchBackend().open(tiny_config("bf16")).gradients(text_batch(CONFIG))
    assert graphs() == 0


@pytest.mark.parametrize("scope, programs", SCOPES)
def test_the_tapped_program_is_a_graph_of_its_own_and_the_trained_one_stays(graphs, scope, programs):
    """Blocks that are compiled by themselves share one."""
    config = tiny_config("bf16", compiled=True, layers=3, train={"sequence_length": 32})
    compiling = config.compile.model_copy(update={"scope": scope, "backend": "aot_eager"})
    session = TorchBackend().open(config.model_copy(update={"compile": compiling}))
    micro = text_batch(config).micro_batches(2)[0]
    before = session.gradients(micro)
    for _ in range(2):
        session.observe(micro, observed_names(config))
    assert graphs() == 2 * programs
    with torch._dynamo.config.patch(error_on_recompile=True):
        after = session.gradients(micro)
    assert graphs() == 2 * programs and not counters["graph_break"]
    assert all((after.grads[name] == grad).all() for name, grad in before.grads.items())


def restarts():
    """Why dynamo has traced a program again, of every program since the test began."""
    return [reason for one in get_compilation_metrics() for reason in one.restart_reasons or ()]


def test_no_program_is_traced_twice(graphs):
    clear_compilation_metrics()
    session, micro = TorchBackend().open(CONFIG), text_batch(CONFIG).micro_batches(2)[0]
    session.step(text_batch(CONFIG))
    session.observe(micro, ["embed", "grad/blocks.0.attn.q"])
    session.sketch(micro)
    assert graphs() == 4 and not restarts()
    # The negative twin: the total as a scalar.
    session.compiled(session.micro_loss)(*session.to_device(micro), session.total_weight(micro))
    assert restarts()
