"""Plan operations of the graph: the tensors that they keep for the backward pass, and the memory of their two passes.

Llama's attention and SwiGLU have a formula each (core/plan/formulas.py), in which their operations share tensors; any
other operation is planned by its kind alone (`by_kind`), whatever the family.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby

from lockstep.core.model.graph import INNER, KINDS, OUTPUT, Graph, Operation
from lockstep.core.plan.formulas import Part, attention, copies, kernel_saved, mlp, norm
from lockstep.core.plan.phase import Tape
from lockstep.core.plan.sizes import Sizes


@dataclass(frozen=True)
class Link:
    """Operations in a row that are computed again together, or a sum into the residual stream.

    name: of their part, by which what they save is listed. plan: None of a sum.
    """

    name: str
    plan: Part | None


def parts_of(
    z: Sizes, graph: Graph, operations: Sequence[Operation], masked: bool, chosen: AbstractSet[str] = frozenset()
) -> list[Link]:
    """Return the operations of the graph in their order, by part. chosen: the parts that are computed again."""
    found = []
    for name, group in groupby(operations, key=lambda one: (one.part, one.kind == "sum")):
        members = list(group)
        if name[1]:
            found += [Link(name[0], None)] * len(members)
        else:
            found.append(Link(name[0], _together(_plans(z, graph, members, masked, chosen))))
    return found


def _plans(
    z: Sizes, graph: Graph, members: Sequence[Operation], masked: bool, chosen: AbstractSet[str]
) -> Iterator[Part]:
    """Return the plan of consecutive operations: one formula for those that it covers, else one by one."""
    again = "norms" in chosen
    covered: dict[str, tuple[str, Part]] = {}
    for one in members:
        if one.kind == "attention" and (taps := _around_attention(graph, members, one)):
            covered |= dict.fromkeys(taps, (one.tap, attention(z, masked, again)))
        if one.kind == "gated" and (taps := _around_gated(graph, members, one)):
            covered |= dict.fromkeys(taps, (one.tap, mlp(z, again, bool(chosen & {"mlp", "block"}))))
    # Tensors of the stream that a formula keeps where nothing is cast; an operation that reads them keeps them as well.
    there = {tap for one in members if one.tap in covered for tap in one.reads.values()}
    done = set()
    for one in members:
        anchor, plan = covered.get(one.tap, (one.tap, None))
        if plan is None:
            yield norm(z, one) if one.kind == "norm" else by_kind(z, graph, one, masked, there)
        elif anchor not in done:
            yield plan
        done.add(anchor)


def _around_attention(graph: Graph, members: Sequence[Operation], one: Operation) -> list[str]:
    """List the taps that `attention` covers: projections, rotations, kernel and output projection; or none."""
    rotated = [graph.by_tap[one.reads[role]] for role in ("q", "k")]
    made = [graph.by_tap[x.reads["x"]] for x in rotated if x.kind == "rope"] + [graph.by_tap[one.reads["v"]]]
    made += [reader for reader in members if reader.kind == "linear" and one.tap in reader.reads.values()]
    whole = len(made) == 4 and all(x.kind == "linear" and x in members for x in made)
    # The formula is of queries as wide as the stream.
    as_wide = one.width == made[-1].width if whole else False
    return [x.tap for x in (*made, *rotated, one)] if as_wide else []


def _around_gated(graph: Graph, members: Sequence[Operation], one: Operation) -> list[str]:
    """List the taps that `mlp` covers: the products before and after, and what is between them; or none."""
    made = [graph.by_tap[tap] for tap in one.reads.values()]
    made += [reader for reader in members if reader.kind == "linear" and one.tap in reader.reads.values()]
    whole = len(made) == 3 and all(x.kind == "linear" and x in members for x in made)
    return [x.tap for x in (*made, one)] if whole else []


def _together(plans: Iterable[Part]) -> Part:
    """Join consecutive parts into one, which is computed again from what the first one reads."""
    first, *others = plans
    for after in others:
        saved = {**first.saved}
        for name, size in after.saved.items():
            saved[name] = saved.get(name, 0.0) + size
        again = None
        if first.again or after.again:
            again = (first.again or first.forward) + (after.again or after.forward)
        first = Part(
            saved,
            first.forward + after.forward,
            after.backward + first.backward,
            first.products + after.products,
            max(first.entry, after.entry),
            again,
            after.waiting + first.waiting,
        )
    return first


def _kept(z: Sizes, graph: Graph, one: Operation, role: str) -> int:
    """Return bytes of a number that an operation keeps, by role; 0 of the residual stream, which the block keeps."""
    if role in (OUTPUT, INNER):
        return z.stream if role == OUTPUT or not z.fused else 0
    writer = graph.by_tap[one.reads[role]]
    if KINDS[one.kind].rounds_operands:
        narrow = 0 if z.fused and z.fp8 else z.operand
        return narrow if z.casts else z.stream
    if writer.kind == "sum" or writer.part == "embedding":
        return 0
    # A compiled program makes again what is pointwise, from the outputs of products.
    return z.stream if not z.fused else z.operand if KINDS[writer.kind].rounds_operands else 0


def by_kind(z: Sizes, graph: Graph, one: Operation, masked: bool, there: set[str]) -> Part:
    """Return one operation by its kind: it keeps what its derivative needs (`Kind.saves`), and makes what it writes.

    A kind with products keeps operands in the operand dtype, and a copy of its weight where that is another one; others
    keep tensors of the stream, which a fused program makes again. there: taps that are kept already; what is kept here
    is added.
    """
    kind, n = KINDS[one.kind], z.tokens
    products = kind.rounds_operands
    width = {role: math.prod(graph.by_tap[tap].width) for role, tap in one.reads.items()}
    out = math.prod(one.width)
    kept: dict[str, float] = {}
    for role in tuple(one.reads) if kind.saves is None else kind.saves:
        tap = one.reads.get(role, f"{one.tap}.{role}")
        size, numbers = _kept(z, graph, one, role), n * width.get(role, out)
        # An eager cast makes a copy for each layer that reads a tensor.
        copied = products and z.casts and not z.fused
        if size and (copied or tap not in there):
            kept[f"{one.tap}.{role}"] = float(size * numbers)
            there |= set() if copied else {tap}
    if one.kind == "attention":
        kept = {f"{one.tap}.{name}": size for name, size in kernel_saved(z, masked).items()}
    weights = sum(parameter.size for parameter in one.parameters.values())
    if products and weights:
        kept[f"{one.tap}.weight"] = copies(z, weights) if z.casts else 0.0
    made = float((z.operand if z.fused and products else z.stream) * n * out)
    forward = Tape()
    forward.make(**kept)
    forward.make(out=made)
    forward.free("out")
    back = Tape(forward.there)
    back.make(**{f"d_{role}": float(z.stream * n * numbers) for role, numbers in width.items()})
    back.make(gradients=float(z.stream * weights))
    back.free(*(f"d_{role}" for role in width), *kept)
    entry = 0.0 if z.fused else float(z.stream * n * sum(width.values()))
    return Part(forward.there, forward.phase, back.phase, float(z.operand * n * out) if products else 0.0, entry)
