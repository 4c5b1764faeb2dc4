"""Names and shapes from the model's graph: parameters, groups, taps, edges.

Canonical names are torch's `state_dict` keys and the JAX model's paths.
"""

from __future__ import annotations

from lockstep.core.config.schema import ModelConfig, RunConfig
from lockstep.core.model.families import graph_of
from lockstep.core.model.graph import KINDS, Group, Operation, Shape

# Prefix of gradients: `grad/NAME` is d loss / d NAME for a tap, an edge or a parameter, from the tapped program.
GRADIENT = "grad/"


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Return every parameter's shape in canonical order; matrices are (out, in). A tied head has no entry."""
    return {name: parameter.shape for name, parameter in graph_of(model).parameters.items()}


def groups_of(model: ModelConfig) -> dict[str, Group]:
    """Return the optimizer group of every parameter, in canonical order. A tied head belongs to `embedding`."""
    return {name: parameter.group for name, parameter in graph_of(model).parameters.items()}


def layer_of(name: str) -> int | None:
    """Return the block of a parameter or tap under any prefix (`exp_avg/…`); None outside the blocks."""
    parts = name.rpartition("/")[2].split(".")
    return int(parts[1]) if parts[0] == "blocks" else None


def tap_names(model: ModelConfig) -> list[str]:
    """Return every forward tap of the model, in the order of the chain."""
    return graph_of(model).taps


def edge_names(model: ModelConfig) -> list[str]:
    """Return the model's edges, from tensors with several readers to each reader. Only their gradients are observed."""
    return list(graph_of(model).edges)


def probe_shapes(model: ModelConfig, batch: int, length: int) -> dict[str, Shape]:
    """Return the shape of every tap and edge for `batch` sequences of `length` tokens."""
    return graph_of(model).shapes(batch, length)


def cancelled(model: ModelConfig) -> dict[str, str]:
    """Map biases whose gradient is 0 in exact arithmetic to the weight of their layer.

    Without RoPE, a bias of keys adds one number to all scores of a query, which does not change the softmax. The
    computed gradient is only the rounding error of a sum that cancels.
    """
    graph = graph_of(model)
    makers = [graph.by_tap[one.reads["k"]] for one in graph.operations if one.kind == "attention"]
    plain = [one for one in makers if one.kind == "linear" and "bias" in one.params and not model.attention_cap]
    return {one.params["bias"]: one.params["weight"] for one in plain}


def in_fp8(config: RunConfig, operation: Operation) -> bool:
    """Return whether an operation is a linear layer whose product the run computes in FP8."""
    return KINDS[operation.kind].in_fp8 and config.precision.is_fp8(operation.module or "")


def fp8_modules(config: RunConfig) -> frozenset[str]:
    """Return the canonical names of the modules whose products the run computes in FP8."""
    return frozenset(filter(config.precision.is_fp8, graph_of(config.model).linears))
