"""The chain of a step: its links, their phases and their order. Forward links are the operations of the graph.

Ids appear as `stage` in verdicts. A forward stage also has a backward pass, with the same id and the phase `backward`.
`place` gives the position of a link in the chain of a step. The first broken link is the origin.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lockstep.core.components.loss_heads import LOSS_HEADS
from lockstep.core.config.schema import AttentionConfig, LossConfig, ModelConfig, RunConfig
from lockstep.core.model.families import FAMILIES, Family, graph_of
from lockstep.core.model.graph import KINDS, Operation

UPDATE = (
    "grad_norm",
    "clip_coefficient",
    "learning_rate",
    "moments",
    "update",
    "loss_scale",
    "fp8_amax",
    "step_count",
    "record",
)
LAST_BLOCK = 1 << 30


@dataclass(frozen=True)
class Chain:
    """The links of a step, in order: every link that a step of any family can have.

    kinds: forward stage id → kind of its operation, in the order of the chain.
    before: ids of the stages before the blocks.
    phases: stage id → the phase in which it first acts, in the order of the chain.
    order: stage id → its number.

    Links that are not stages of the model, among others:
    - `compiler`: the training program against the tapped one.
    - `gradients`: the gradients that the session returns for a micro-batch against those of its program.
    - `reduction`: the gradients that ranks share against each rank's own.
    - `evaluation`: the scores of held-out tokens.
    - `fp8_amax`: the amax history of FP8's delayed scaling.
    - `record`: numbers of a step's record that no other link reads.
    - `sampling`: logits that are computed with a cache.
    """

    kinds: dict[str, str]
    before: frozenset[str]
    phases: dict[str, str]
    order: dict[str, int]


def chain() -> Chain:
    """Return the links of all families and loss heads that are registered now."""
    return _chain(tuple(FAMILIES.items()), tuple(LOSS_HEADS))


@lru_cache(maxsize=4)
def _chain(families: tuple[tuple[str, Family], ...], heads: tuple[str, ...]) -> Chain:
    kinds: dict[str, str] = {}
    before: set[str] = set()
    order: list[str] = []
    # A window, and a cap on logits, are separate stages. Two blocks show a model with a window and one without.
    options: tuple[dict[str, Any], ...] = ({}, {"window": 1, "logits_cap": 1.0})
    for (family, _), option, head in itertools.product(families, options, heads):
        model = ModelConfig(family=family, layers=2, **option)
        operations = graph_of(model, None, LossConfig.model_validate({"head": head})).operations
        _merge(order, [one.id for one in operations])
        kinds |= {one.id: one.kind for one in operations}
        first = next((n for n, one in enumerate(operations) if one.layer is not None), 0)
        before |= {one.id for one in operations[:first]}
    phases = {
        "tokens": "data",
        "weights": "state",
        **dict.fromkeys((*order, "loss"), "forward"),
        **dict.fromkeys(("compiler", "gradients", "accumulation", "reduction"), "backward"),
        **dict.fromkeys(UPDATE, "update"),
        "checkpoint": "state",
        "evaluation": "forward",
        "sampling": "forward",
    }
    numbers = {stage: number for number, stage in enumerate(phases)}
    return Chain({id: kinds[id] for id in order}, frozenset(before), phases, numbers)


def _merge(order: list[str], ids: Iterable[str]) -> None:
    """Insert the ids that `order` lacks, each after the one that it follows."""
    at = 0
    for id in ids:
        if id in order:
            at = order.index(id) + 1
        else:
            order.insert(at, id)
            at += 1


def is_forward(stage: str) -> bool:
    """Return whether a stage is a link of the forward chain, the loss included."""
    return stage == "loss" or stage in chain().kinds


def is_library_head(stage: str) -> bool:
    """Return whether a stage is a library's loss head, which computes logits and NLL together."""
    return chain().kinds.get(stage) == "library_head"


def rounds_operands(stage: str) -> bool:
    """Return whether a stage rounds operands to the policy's format. This rounding then dominates the twin's error."""
    kind = chain().kinds.get(stage)
    return kind is not None and KINDS[kind].rounds_operands


def keeps_product(stage: str, role: str) -> bool:
    """Return whether an output (role OUTPUT), or the gradient of an input, is a product that stays unrounded."""
    kind = chain().kinds.get(stage)
    return kind is not None and role in KINDS[kind].kept


def library_heads() -> tuple[str, ...]:
    """Return the stages of all libraries' loss heads."""
    return tuple(filter(is_library_head, chain().kinds))


def is_operation(stage: str) -> bool:
    """Return whether a stage is a single operation of a program, such as `aten.gelu` (`watch(operations=)`)."""
    return "." in stage


def place(stage: str, phase: str, layer: int | None) -> tuple[int, int, int]:
    """Return the position of a link in the chain of a step, as a sort key. Backward is the forward chain in reverse.

    Single operations of a program come before the other links of their phase, in the order in which they ran. Raises
    KeyError for a stage that no family has.
    """
    if is_operation(stage):
        return (1 if phase == "forward" else 2, -LAST_BLOCK, 0)
    links = chain()
    minor = links.order[stage]
    if not is_forward(stage):
        return (0 if stage in ("tokens", "weights") else 3, minor, 0)
    block = -1 if stage in links.before else LAST_BLOCK if layer is None else layer
    return (1, block, minor) if phase == "forward" else (2, -block, -minor)


def stages_of(config: RunConfig) -> Sequence[Operation]:
    """Return every forward stage of a run."""
    return forward_stages(config.model, config.attention, config.loss)


def forward_stages(
    model: ModelConfig, attention: AttentionConfig | None = None, loss: LossConfig | None = None
) -> Sequence[Operation]:
    """Return every forward stage of the model in the order of the chain, as from `graph_of`."""
    return graph_of(model, attention, loss).operations


@dataclass(frozen=True)
class Shared:
    """A tensor with several consumers. Its gradient is the sum of theirs.

    name: tap or parameter.
    producer: the stage that writes it; for a parameter, the first stage to read it, whose part is the last of the sum.
    consumers: (stage, role, edge); the edge is None if the part has no separate name.
    """

    name: str
    producer: Operation
    consumers: tuple[tuple[Operation, str, str | None], ...]


def shared_tensors(config: RunConfig) -> list[Shared]:
    """Return every tensor with several consumers: the residual stream, the outputs of norms, a tied embedding."""
    graph = graph_of(config.model, config.attention, config.loss)
    readers: dict[str, list[tuple[Operation, str, str | None]]] = {}
    for name, edge in graph.edges.items():
        read = edge.tap or (edge.parameter.name if edge.parameter else "")
        readers.setdefault(read, []).append((edge.reader, edge.role, name))
    found = []
    for read, consumers in readers.items():
        if read in graph.by_tap:
            found.append(Shared(read, graph.by_tap[read], tuple(consumers)))
        else:
            owner, role = next((one, role) for one in graph.operations for role, p in one.params.items() if p == read)
            found.append(Shared(read, owner, (*consumers, (owner, role, None))))
    return found
