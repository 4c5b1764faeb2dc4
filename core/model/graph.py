"""The model as data: the operations of a family, in the order of the forward chain.

An operation reads tensors, parameters and arrays of the batch, and writes one tensor, its *tap*. A family
(core/model/families) lists its operations once; names, shapes, taps, edges, stages, FLOPs, groups and the linear layers
that FP8 may take are derived from that list. The backends write the mathematics once for each *kind* of operation.

Axes: B batch, S sequence, D hidden, H query heads, K key-value heads, E head dimension, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

Shape = tuple[int, ...]
Group = Literal["embedding", "head", "matrices", "gains", "biases"]

# Optimizer groups, in the order in which tables and torch's parameter groups list them.
GROUPS: tuple[Group, ...] = ("embedding", "head", "matrices", "gains", "biases")


@dataclass(frozen=True)
class Normal:
    """Initial values from a normal distribution with mean 0. std: standard deviation."""

    std: float


@dataclass(frozen=True)
class Constant:
    """A single initial value for all elements."""

    value: float


@dataclass(frozen=True)
class Parameter:
    """A trained tensor.

    name: canonical: torch's `state_dict` key and the JAX model's path. shape: (out, in) of a matrix. group: its
    optimizer group. initial: the distribution of its initial values.
    """

    name: str
    shape: Shape
    group: Group
    initial: Normal | Constant

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Kind:
    """The properties that all operations of one kind share.

    rounds_operands: its products round their operands to the policy's operand format. in_fp8: it is a linear layer
    whose product may be computed in FP8. kept: those of its products, by role of an input or OUTPUT, that are not
    rounded to that format again. stands_for: the tap after which its edges are named, instead of its own.
    saves: what its derivative needs, by role of an input, or OUTPUT; None: all that it reads.
    """

    name: str
    rounds_operands: bool = False
    in_fp8: bool = False
    kept: tuple[str, ...] = ()
    stands_for: str = ""
    saves: tuple[str, ...] | None = None


# Among `Kind.saves`: what the operation writes.
OUTPUT = "output"

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("embedding", saves=()),
        # Times √D; a learned row for each position, added.
        Kind("scale", saves=()),
        Kind("position", saves=()),
        Kind("norm"),
        # RMSNorm with the gain 1 + w; LayerNorm; RMSNorm of each head.
        Kind("centered_norm"),
        Kind("layer_norm"),
        Kind("head_norm"),
        Kind("linear", rounds_operands=True, in_fp8=True),
        # Linear in what they read: the derivative needs none of it.
        Kind("rope", saves=()),
        Kind("attention", rounds_operands=True),
        # silu(gate) ⊙ up, gelu(gate) ⊙ up, gelu(up).
        Kind("gated"),
        Kind("gated_gelu"),
        Kind("gelu"),
        Kind("sum", saves=()),
        Kind("logits", rounds_operands=True, kept=(OUTPUT, "weight"), stands_for="logits"),
        # cap · tanh(x / cap).
        Kind("cap", saves=(OUTPUT,)),
        Kind("nll"),
        Kind("library_head", rounds_operands=True, stands_for="logits"),
    )
}


@dataclass(frozen=True)
class Operation:
    """A link of the forward chain.

    id:     the literal stage id of verdicts; the same in every block.
    kind:   a name of KINDS: operations of one kind share their mathematics.
    tap:    the tensor that it writes, (B, S, *width).
    layer:  its block, or None outside the blocks.
    part:   the part of the model that activation checkpointing computes again together (`recompute.parts`).
    reads:  input role → tap.
    parameters: input role → parameter.
    width:  the axes of its output after (B, S).
    batch:  arrays of the batch that it reads, by their name, which is the role too.
    flops:  of its matrix products, forward, for one token: a constant, and so many times the sequence length, each
            token seeing half of the sequence on average.
    edges:  input role → the name of what this operation alone sends back there, where several operations read the
            tensor or parameter. Forward, an edge is the tensor itself.
    """

    id: str
    kind: str
    tap: str
    layer: int | None
    part: str
    reads: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    width: Shape = ()
    batch: tuple[str, ...] = ()
    flops: tuple[float, float] = (0.0, 0.0)
    edges: Mapping[str, str] = field(default_factory=dict)

    @property
    def params(self) -> dict[str, str]:
        """Input role → canonical name of the parameter."""
        return {role: parameter.name for role, parameter in self.parameters.items()}

    @property
    def module(self) -> str | None:
        """Canonical name of the module that holds its weight, None without one."""
        weight = self.parameters.get("weight")
        return None if weight is None else weight.name.removesuffix(".weight")

    def sends(self, role: str) -> str:
        """Name the tap, edge or parameter whose gradient this operation alone makes through input `role`."""
        return self.edges.get(role) or self.reads.get(role) or self.parameters[role].name

    def flops_at(self, length: int) -> float:
        """Return FLOPs of its products, forward, for one token of a sequence of `length` tokens."""
        constant, each = self.flops
        return constant + each * length


@dataclass(frozen=True)
class Edge:
    """The entry of a tensor with several readers into one of them; its gradient is that reader's share.

    reader: the operation. role: its input. tap, parameter: what is read, the other is None.
    """

    reader: Operation
    role: str
    tap: str | None
    parameter: Parameter | None


@dataclass(frozen=True)
class Graph:
    """The operations of one model, in the order of the chain, the per-token NLL last."""

    operations: tuple[Operation, ...]

    @classmethod
    def of(cls, operations: Sequence[Operation]) -> Graph:
        """Build the graph of these operations, with their edges. Raises ValueError unless the chain is sound.

        Sound: every kind is known, every tap is written once, before it is read, and a name is one parameter.
        """
        _check(operations)
        readers: dict[str, int] = {}
        for one in operations:
            for tap in one.reads.values():
                readers[tap] = readers.get(tap, 0) + 1
        first: set[str] = set()
        found = []
        for one in operations:
            at = KINDS[one.kind].stands_for or one.tap
            edges = {role: f"{at}.{role}" for role, tap in one.reads.items() if readers[tap] > 1}
            # The first operation that reads a shared parameter owns it, and needs no edge.
            edges |= {role: f"{at}.{role}" for role, name in one.params.items() if name in first}
            first |= set(one.params.values())
            found.append(replace(one, edges=edges) if edges else one)
        return cls(tuple(found))

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Every parameter by canonical name, in canonical order: that of the operation that first reads it."""
        return {p.name: p for one in self.operations for p in one.parameters.values()}

    @cached_property
    def by_tap(self) -> dict[str, Operation]:
        """The operation that writes each tap."""
        return {one.tap: one for one in self.operations}

    @property
    def taps(self) -> list[str]:
        """Every tap, in the order of the chain."""
        return list(self.by_tap)

    @cached_property
    def edges(self) -> dict[str, Edge]:
        """Every edge by name, in the order of the chain."""
        return {
            edge: Edge(one, role, one.reads.get(role), one.parameters.get(role))
            for one in self.operations
            for role, edge in one.edges.items()
        }

    def shapes(self, batch: int, length: int) -> dict[str, Shape]:
        """Return the shape of every tap and edge on `batch` sequences of `length` tokens."""
        found = {tap: (batch, length, *one.width) for tap, one in self.by_tap.items()}
        for name, edge in self.edges.items():
            found[name] = edge.parameter.shape if edge.parameter else found[edge.tap or ""]
        return found

    @cached_property
    def linears(self) -> dict[str, Operation]:
        """The linear layers whose products FP8 may take, by the canonical name of their module."""
        return {one.module: one for one in self.operations if KINDS[one.kind].in_fp8 and one.module is not None}

    @cached_property
    def into_scores(self) -> frozenset[str]:
        """The parameters of what attention's scores are made of: projections of queries and keys, norms of heads."""
        found: set[str] = set()
        for one in self.operations:
            for role in ("q", "k") if one.kind == "attention" else ():
                maker = self.by_tap[one.reads[role]]
                found |= set(maker.params.values())
                # Behind a rotation and a norm of heads, whose gains are among them.
                while maker.kind != "linear":
                    maker = self.by_tap[maker.reads["x"]]
                    found |= set(maker.params.values())
        return frozenset(found)

    @property
    def head(self) -> Parameter:
        """The parameter that turns hidden states into logits."""
        return next(one.parameters["weight"] for one in reversed(self.operations) if one.parameters)

    def block(self, layer: int = 0) -> list[Operation]:
        """Return the operations of one block."""
        return [one for one in self.operations if one.layer == layer]


def _check(operations: Sequence[Operation]) -> None:
    written: set[str] = set()
    parameters: dict[str, Parameter] = {}
    for one in operations:
        if one.kind not in KINDS:
            raise ValueError(f"{one.tap}: {one.kind!r} is no kind of operation; the kinds are {', '.join(KINDS)}")
        if missing := [tap for tap in one.reads.values() if tap not in written]:
            raise ValueError(f"{one.tap} reads {', '.join(missing)}, which no earlier operation writes")
        if one.tap in written:
            raise ValueError(f"two operations write {one.tap}")
        written.add(one.tap)
        for parameter in one.parameters.values():
            if parameters.setdefault(parameter.name, parameter) != parameter:
                raise ValueError(f"{parameter.name} is two different parameters")
