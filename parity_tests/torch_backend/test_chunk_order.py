"""A compiled program has the logits of one chunk at a time, in whatever order a compiler computes its graph.

On CUDA, Inductor once computed the logits of all chunks before it read any: 97.9 GB where 76.5 were planned. Its order
is its own, so the graph is judged and not one order of it: what reads a chunk's logits, or their gradient, must come
before the next chunk's logits by what it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from lockstep.core.config.file import load_config
from lockstep.torch_backend.kernels import chunked_loss
from lockstep.torch_backend.precision import POLICIES
from lockstep.torch_backend.tools.plan import compiled_forward, fake

ROWS, VOCAB, HIDDEN, CHUNKS = 16, 384, 24, 4
aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default}
PRODUCTS |= {torch.ops.lockstep.product_by_fp32.default, torch.ops.lockstep.wide_product.default}
# These read their arguments from memory: the compiler cannot fuse them with what they read.
OPAQUE = PRODUCTS | {torch.ops.lockstep.after.default}
# The results of these are written to memory, and what follows reads them from there.
WRITTEN = OPAQUE | {aten.amax.default, aten.sum.default, aten.sum.dim_IntList}


def closure(start: Iterable[Node], following: str) -> set[Node]:
    """Nodes that are reached along `users` or `all_input_nodes`, `start` with them."""
    found, waiting = set[Node](), list(start)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(getattr(node, following))
    return found


def readers(node: Node) -> set[Node]:
    """Nodes whose kernels may read `node` itself: a compiler fuses what lies between until something is written."""
    found, waiting = set(node.users), [user for user in node.users if user.target not in WRITTEN]
    while waiting:
        # The first user that reads it from memory has it written, also for those after it.
        for user in sorted(waiting.pop().users):
            if user not in found:
                found.add(user)
                waiting += [] if user.target in WRITTEN else [user]
            if user.target in OPAQUE:
                break
    return found


def too_late(graph: torch.fx.GraphModule) -> list[Node]:
    """List the nodes that can still read a chunk's logits, or something as large, when the next chunk's exist."""
    nodes = [node for node in graph.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    large = {node for node in nodes if node.meta["val"].numel() == ROWS * VOCAB}
    logits = [node for node in nodes if node.target in PRODUCTS and node.meta["val"].shape == (ROWS, VOCAB)]
    assert len(logits) == CHUNKS
    found = []
    for here, following in pairwise(logits):
        before = closure([following], "all_input_nodes")
        of_chunk = large & closure([here], "users") - closure([following], "users")
        assert of_chunk
        found += [reader for node in of_chunk for reader in readers(node) if reader not in before]
    return found


def head(
    policy: str = "bf16",
    z_loss: float = 0.0,
    tap: Callable[[str, Tensor], Tensor] | None = None,
    library: str = "blas",
) -> Any:
    """Compile the graph of the chunked head alone."""
    with FakeTensorMode():
        dtype, batch = POLICIES[policy].stream, (2, ROWS * CHUNKS // 2)
        x, weight = (torch.empty(*size, HIDDEN, dtype=dtype, requires_grad=True) for size in (batch, (VOCAB,)))
        targets, weights = torch.empty(batch, dtype=torch.long), torch.empty(batch, dtype=dtype)
        total = torch.empty((), dtype=torch.float64)
        arguments = x, weight, targets, weights, total, replace(POLICIES[policy], library=library), z_loss, ROWS, tap
        return compiled_forward(chunked_loss.chunked_loss, *arguments)


@pytest.mark.parametrize("policy", ["fp64", "fp32", "bf16", "fp16"])
def test_one_chunk_at_a_time_in_every_order(policy):
    assert too_late(head(policy)) == []


def test_one_chunk_at_a_time_where_products_add_in_place():
    assert too_late(head(library="brgemm")) == []


def test_one_chunk_at_a_time_with_z_loss_or_where_a_tap_looks():
    assert too_late(head(z_loss=0.1)) == []
    assert too_late(head(tap=lambda name, value: value)) == []


def test_one_chunk_at_a_time_in_the_whole_program():
    settings = {
        "device": "cpu",
        "model.vocab_size": str(VOCAB),
        "model.hidden": "64",
        "model.layers": "1",
        "model.heads": "4",
        "model.kv_heads": "2",
        "model.ffn_hidden": "160",
        "train.batch_size": "2",
        "train.micro_batch_size": "2",
        "train.sequence_length": str(ROWS * CHUNKS // 2),
        "optim.warmup_steps": "0",
        "loss.head": "chunked",
        "loss.chunk": str(ROWS),
        "recompute.parts": "block",
        "precision.policy": "fp8_tensorwise",
    }
    with FakeTensorMode():
        model, arguments = fake(load_config(None, settings))
        assert too_late(compiled_forward(model.loss, *arguments)) == []


@pytest.mark.parametrize("forgotten", [0, 1, 2, 3, None])
@pytest.mark.parametrize("library", ["blas", "brgemm"])
def test_an_order_that_is_lost_is_seen(monkeypatch, forgotten, library):
    """One of the results is not waited for, or none is."""
    honest = chunked_loss.after

    def forgetful(x, done):
        return x if forgotten is None else honest(x, done[:forgotten] + done[forgotten + 1 :])

    monkeypatch.setattr(chunked_loss, "after", forgetful)
    assert too_late(head(library=library))
