"""The model as data: the operations of a family, in the order of the forward chain.

An operation reads tensors, parameters and arrays of the batch, and writes one tensor, its *tap*. A family
(core/model/families) lists its operations once. Names, shapes, taps, edges, stages, FLOPs, groups and the linear layers
for FP8 are derived from that list. Each backend implements the mathematics once for each *kind* of operation.

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

# Optimizer groups, in the order of tables and of torch's parameter groups.
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

    name: canonical name, which is torch's `state_dict` key and the JAX model's path. shape: for a matrix, (out, in).
    group: its optimizer group. initial: the distribution of its initial values.
    """

    name: str
    shape: Shape
    group: Group
    initial: Normal | Constant

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Kind:
    """The properties that all operations of one kind share.

    rounds_operands: its products round their operands to the policy's operand format. in_fp8: its product may be
    computed in FP8. kept: products whose results are not rounded to that format, by role of an input (its gradient) or
    OUTPUT. stands_for: the tap that gives its edges their names, instead of its own. saves: the tensors that its
    derivative needs, by role of an input, OUTPUT or INNER; None is all inputs.
    """

    name: str
    rounds_operands: bool = False
    in_fp8: bool = False
    kept: tuple[str, ...] = ()
    stands_for: str = ""
    saves: tuple[str, ...] | None = None


# The role of an operation's output, in `Kind.saves` and `Kind.kept`, and of an intermediate of its shape.
OUTPUT, INNER = "output", "inner"

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("embedding", saves=()),
        # x · √D; x + a learned row for each position.
        Kind("scale", saves=()),
        Kind("position", saves=()),
        Kind("norm"),
        # RMSNorm with the gain 1 + w; LayerNorm; RMSNorm of each head.
        Kind("centered_norm"),
        Kind("layer_norm"),
        Kind("head_norm"),
        Kind("linear", rounds_operands=True, in_fp8=True),
        # A rotation is linear: its derivative needs no input.
        Kind("rope", saves=()),
        Kind("attention", rounds_operands=True),
        # silu(gate) ⊙ up, gelu(gate) ⊙ up, gelu(up).
        Kind("gated"),
        Kind("gated_gelu", saves=("gate", "up", INNER)),
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
    """An operation of the forward chain.

    id:     the stage id in verdicts; the same in every block.
    kind:   a name in KINDS; operations of one kind have the same mathematics.
    tap:    the name of its output, (B, S, *width).
    layer:  its block, or None outside the blocks.
    part:   the part of the model that activation checkpointing recomputes together (`recompute.parts`).
    reads:  input role → tap.
    parameters: input role → parameter.
    width:  the axes of its output after (B, S).
    batch:  names of the arrays of the batch that it reads; they are also the roles.
    flops:  forward FLOPs per token of its matrix products: (constant, factor of the sequence length); a token sees half
            of the sequence on average.
    edges:  input role → edge, for a tensor or parameter with several readers. The gradient of an edge is this
            operation's part of the tensor's gradient. The value of an edge is the tensor itself.
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
        """The mapping from input roles to canonical names of parameters."""
        return {role: parameter.name for role, parameter in self.parameters.items()}

    @property
    def module(self) -> str | None:
        """The canonical name of the module that holds its weight; None without a weight."""
        weight = self.parameters.get("weight")
        return None if weight is None else weight.name.removesuffix(".weight")

    def sends(self, role: str) -> str:
        """Return the tap, edge or parameter whose gradient this operation alone computes through input `role`."""
        return self.edges.get(role) or self.reads.get(role) or self.parameters[role].name

    def flops_at(self, length: int) -> float:
        """Return the forward FLOPs of its products per token, for sequences of `length` tokens."""
        constant, each = self.flops
        return constant + each * length


@dataclass(frozen=True)
class Edge:
    """The connection from a tensor with several readers to one reader; its gradient is that reader's part.

    reader: the operation. role: its input. tap, parameter: the source; one of them is None.
    """

    reader: Operation
    role: str
    tap: str | None
    parameter: Parameter | None


@dataclass(frozen=True)
class Graph:
    """The operations of one model, in the order of the chain; the per-token NLL is the last."""

    operations: tuple[Operation, ...]

    @classmethod
    def of(cls, operations: Sequence[Operation]) -> Graph:
        """Build the graph of these operations, with their edges.

        Raises ValueError for an unknown kind, for a tap that is written twice or read before it is written, and for two
        different parameters with one name.
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
            # The first operation that reads a shared parameter needs no edge.
            edges |= {role: f"{at}.{role}" for role, name in one.params.items() if name in first}
            first |= set(one.params.values())
            found.append(replace(one, edges=edges) if edges else one)
        return cls(tuple(found))

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Every parameter by canonical name, in canonical order: that of the operations that first read them."""
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
        """Return the shape of every tap and edge for `batch` sequences of `length` tokens."""
        found = {tap: (batch, length, *one.width) for tap, one in self.by_tap.items()}
        for name, edge in self.edges.items():
            found[name] = edge.parameter.shape if edge.parameter else found[edge.tap or ""]
        return found

    @cached_property
    def linears(self) -> dict[str, Operation]:
        """The linear layers whose products may be in FP8, by the canonical name of their module."""
        return {one.module: one for one in self.operations if KINDS[one.kind].in_fp8 and one.module is not None}

    @cached_property
    def into_scores(self) -> frozenset[str]:
        """The parameters that affect attention's scores: projections of queries and keys, and norms of heads."""
        found: set[str] = set()
        for one in self.operations:
            for role in ("q", "k") if one.kind == "attention" else ():
                maker = self.by_tap[one.reads[role]]
                found |= set(maker.params.values())
                # Go back through a rotation and a norm of heads, whose gains belong to the result.
                while maker.kind != "linear":
                    maker = self.by_tap[maker.reads["x"]]
                    found |= set(maker.params.values())
        return frozenset(found)

    @property
    def head(self) -> Parameter:
        """The weight of the head, which maps hidden states to logits."""
        return next(one.parameters["weight"] for one in reversed(self.operations) if one.parameters)

    def block(self, layer: int = 0) -> list[Operation]:
        """Return the operations of one block."""
        return [one for one in self.operations if one.layer == layer]


def _check(operations: Sequence[Operation]) -> None:
    written: set[str] = set()
    parameters: dict[str, Parameter] = {}
    for one in operations:
        if one.kind not in KINDS:
            raise ValueError(f"{one.tap}: {one.kind!r} is not a kind of operation; the kinds are {', '.join(KINDS)}")
        if missing := [tap for tap in one.reads.values() if tap not in written]:
            raise ValueError(f"{one.tap} reads {', '.join(missing)}, which no earlier operation writes")
        if one.tap in written:
            raise ValueError(f"two operations write {one.tap}")
        written.add(one.tap)
        for parameter in one.parameters.values():
            if parameters.setdefault(parameter.name, parameter) != parameter:
                raise ValueError(f"{parameter.name} is two different parameters")
