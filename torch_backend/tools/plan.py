"""Measure a step's memory: count saved tensors with fake tensors, or read the allocator's reports of a real step.

Tests compare the formulas of core/plan with both (parity_tests/plan, docs/guide/plan.md).
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from lockstep.core.config.schema import RunConfig
from lockstep.torch_backend.kernels.float8 import apply_float8, float8
from lockstep.torch_backend.kernels.loss_head import apply_loss_head
from lockstep.torch_backend.kernels.recompute import apply_recompute
from lockstep.torch_backend.model import Transformer
from lockstep.torch_backend.precision import policy_of
from lockstep.torch_backend.session import TorchSession
from lockstep.torch_backend.tools.bench import random_batches

# Name of a module → the component of core/plan that counts its saved tensors.
_PART_OF = {"embed": "embedding", "attn_norm": "norms", "mlp_norm": "norms", "final_norm": "norms"}
_PART_OF |= {"attn": "attention", "mlp": "mlp"}
_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.reshape.default,
}


class _Captured(Exception):
    """The signal that the compiled forward pass was captured; it ends the compilation."""


def count_saved(config: RunConfig) -> dict[str, int]:
    """Return the bytes that the eager forward pass of one micro-batch saves for the backward pass, by part.

    The real model runs on fake CPU tensors, without computation or memory. Each storage counts once, and parameters do
    not count. The residual stream, which is the input of a norm, counts as `block inputs` in every module.
    """
    with FakeTensorMode():
        model, arguments = fake(config)
        parameters = {_storage(p) for p in model.parameters()}
        inside: list[str] = ["head and loss"]
        stream: set[int] = set()
        sizes: dict[int, tuple[str, int]] = {}
        alive: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            place = _storage(tensor)
            if place not in parameters and place not in sizes:
                alive.append(tensor)
                sizes[place] = inside[-1], tensor.untyped_storage().nbytes()
            return tensor

        for name, module in model.named_modules():
            part = _PART_OF.get(name.rpartition(".")[2])
            if part:
                _follow(module, part, inside, stream)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            alive.extend(model.loss(*arguments))
        found: Counter[str] = Counter()
        for place, (part, size) in sizes.items():
            found["block inputs" if place in stream else part] += size
    return dict(found)


def _follow(module: nn.Module, part: str, inside: list[str], stream: set[int]) -> None:
    def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        inside.append(part)
        if part == "norms":
            stream.add(_storage(inputs[0]))

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        inside.pop()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def count_compiled(config: RunConfig) -> int:
    """Return the bytes that the compiled forward pass of one micro-batch saves for the backward pass.

    Parameters do not count.
    """
    with FakeTensorMode():
        model, arguments = fake(config)
        graph = compiled_forward(model.loss, *arguments)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    return _handed_over(graph, output.args[0])


def compiled_forward(program: Callable[..., Any], *arguments: Any) -> torch.fx.GraphModule:
    """Return the graph of a program's forward pass that Inductor would generate code for.

    The program passes through Dynamo, AOTAutograd, and Inductor's own passes and min-cut partitioner; no code is
    generated. arguments: fake tensors; the caller has entered their mode.
    """
    found: list[torch.fx.GraphModule] = []

    def capture(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        found.append(graph)
        raise _Captured

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_fx(graph, inputs, inner_compile=capture)

    torch._dynamo.reset()
    try:
        torch.compile(program, fullgraph=True, dynamic=False, backend=backend)(*arguments)
    except BackendCompilerFailed as failure:
        if not isinstance(failure.inner_exception, _Captured):
            raise
    return found[0]


def _handed_over(graph: torch.fx.GraphModule, outputs: Any) -> int:
    """Return the bytes of a forward graph's outputs, without its two results and its inputs.

    Views of one tensor count once.
    """
    bases: dict[Any, int] = {}
    for node in outputs[2:]:
        if not isinstance(node, torch.fx.Node):
            continue
        while node.op == "call_function" and node.target in _VIEWS:
            node = node.args[0]
        value = node.meta["val"]
        if node.op == "call_function" and isinstance(value, Tensor):
            bases[node] = math.prod(map(_known, value.shape)) * value.itemsize
    return sum(bases.values())


def _known(size: int | torch.SymInt) -> int:
    """Return a size as an int; in a checkpointed part it may be a symbol."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def fake(config: RunConfig) -> tuple[Transformer, tuple[Any, ...]]:
    """Build the model and the arguments of `model.loss` for a micro-batch, in the active fake mode."""
    policy = policy_of(config)
    before = torch.get_default_dtype()
    # Build the model in its final dtype: fake parameters cannot change their dtype.
    torch.set_default_dtype(policy.stream)
    try:
        model = Transformer(config)
    finally:
        torch.set_default_dtype(before)
    apply_float8(model, config, float8(config.precision, torch.device("cpu")))
    apply_loss_head(model, config.loss)
    apply_recompute(model, config.recompute)
    shape = config.train.micro_batch_size, config.train.sequence_length
    tokens, targets = (torch.empty(shape, dtype=torch.long) for _ in range(2))
    weights, total = torch.empty(shape, dtype=policy.stream), torch.empty((), dtype=torch.float64)
    documents = (torch.empty(shape, dtype=torch.long),) if config.attention.needs_documents else ()
    return model, (tokens, targets, weights, total, policy, *documents)


def _storage(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage as long as the storage exists."""
    return int(tensor.untyped_storage()._cdata)


def measured_peak(config: RunConfig) -> dict[str, int]:
    """Measure bytes of a forward and backward pass on the CPU, above those kept between steps: `peak`, and `after` it.

    The figures are the CPU allocator's reports (torch.profiler, profile_memory). They include every tensor, eager or
    compiled, and the memory that kernels allocate. The second step is measured, and begins without gradients.
    """
    session = TorchSession(config)
    batch = random_batches(config, 1)[0]
    session.accumulate(batch)
    session.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        held = session.accumulate(batch)
    events = seen.profiler.kineto_results.events()
    now = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    del held
    return {"peak": peak, "after": now}
