"""Memory of a training step by component, and its peak: the operations of the graph in the step's order.

core/plan/parts.py plans the operations, core/plan/head.py the loss head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache

from lockstep.core.config.schema import ModelConfig, OptimConfig, PrecisionConfig, RunConfig
from lockstep.core.model.budget import parameter_count, state_bytes
from lockstep.core.model.families import graph_of
from lockstep.core.model.graph import Graph, Operation
from lockstep.core.model.groups import update_rules
from lockstep.core.plan.formulas import Part
from lockstep.core.plan.gpus import Gpu
from lockstep.core.plan.head import head
from lockstep.core.plan.parts import Link, parts_of
from lockstep.core.plan.phase import Phase, held
from lockstep.core.plan.sizes import Sizes, sizes_of

# CUDA's context with the kernels of cuBLAS, cuDNN and torch: an assumption (0.5 to 0.7 GB are usual on Hopper). NCCL's
# buffers, for several ranks: another.
CONTEXT, NCCL = 0.6e9, 0.4e9
# The caching allocator's excess over the peak of what is allocated, as blocks do not fit together: an assumption.
RESERVE = 0.04
# The name of the residual sums among the saved activations.
INPUTS = "block inputs"


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    state: what stays between steps: weights, moments, buffers. gradients. activations: kept from forward to backward
    pass of a micro-batch, by part. working: beyond those at the peak. peak: the most that is allocated at a time.
    where: in which pass. outside: context and reserve. total: peak and outside.
    """

    state: Mapping[str, float]
    gradients: float
    activations: Mapping[str, float]
    working: float
    peak: float
    where: str
    outside: Mapping[str, float]

    @property
    def steady(self) -> float:
        """Weights and moments: what is allocated between steps."""
        return self.state["weights"] + self.state["moments"]

    @property
    def saved(self) -> float:
        """All activations that are kept."""
        return sum(self.activations.values())

    @property
    def activation_peak(self) -> float:
        """The peak of a forward and backward pass above what stays between steps."""
        return self.peak - sum(self.state.values())

    @property
    def total(self) -> float:
        """Return the memory that the device must have."""
        return self.peak + sum(self.outside.values())


@dataclass(frozen=True)
class Block:
    """The passes of one block; gradients: bytes of its weights'."""

    forward: Phase
    backward: Phase
    saved: Mapping[str, float]
    gradients: float


def block(config: RunConfig, z: Sizes, chosen: AbstractSet[str]) -> Block:
    """Return one block of which these parts are computed again. Its input is there before, its output after it."""
    keep, D = config.recompute.keep_products, _residual(z)
    graph = _one_block(config)
    links = parts_of(z, graph, graph.block(), config.attention.document_mask, chosen)
    products = sum(link.plan.products for link in links if link.plan)
    links = [_chosen_again(link, keep, chosen) for link in links]
    # Up to the last sum but one, that is before the last half, what each part gives lives on as one of Python's names
    # in `Block.forward`, where the program is eager.
    sums = [number for number, link in enumerate(links) if link.plan is None]
    last_half = sums[-2] if len(sums) > 1 else -1
    # The gradient that passes by each half is the caller's.
    # The tensors that each half gives are in its own phase. On the CPU, Inductor keeps tensors of FP32 of rotations and
    # norms for the next block, more where a block is computed again; these stand for them.
    given = (2 if "block" in chosen else 1) * D if z.fused and z.on_cpu else 0.0
    # A program of one block keeps the terms of its inner sums in place of the sums, and the last term is narrow.
    inner = float(z.operand * z.tokens * z.hidden) if z.fused and not z.whole and z.casts else D
    forward, anew, backward, waiting, names = Phase(), Phase(), Phase(), Phase(), 0.0
    saved: dict[str, float] = {}
    for number, link in enumerate(links):
        if link.plan is None:
            # The last sum is the caller's.
            size = D if number == sums[-1] else inner
            saved[INPUTS] = saved.get(INPUTS, 0.0) + size
            if number != sums[-1]:
                forward, anew, backward = forward + held(size), anew + held(size), held(-size) + backward
            continue
        name = held(0.0 if z.fused or number > last_half else D)
        names += name.net
        forward, anew = forward + link.plan.forward + name, anew + (link.plan.again or link.plan.forward) + name
        backward = link.plan.backward.beside(D if link.name == "norms" else given) + backward
        waiting = link.plan.waiting + waiting
        saved[link.name] = saved.get(link.name, 0.0) + _sum(link.plan.saved)
    forward, anew, backward = forward + held(-names), anew + held(-names), backward + waiting
    saved[INPUTS] = saved.pop(INPUTS, 0.0)
    gradients = z.stream * _numbers(graph.block())
    if "block" in chosen:
        again = _again(Part({}, forward, backward, products, again=anew), keep, 0.0)
        forward, backward = again.forward, again.backward
        saved = {INPUTS: D, "kept products": again.saved["products"]}
    return Block(forward + held(D), backward + held(-D), saved, gradients)


def _chosen_again(link: Link, keep: bool, chosen: AbstractSet[str]) -> Link:
    """Return the part as it is, or computed again if it is among the chosen ones."""
    if link.plan is None or link.name not in chosen - {"block"}:
        return link
    return Link(link.name, _again(link.plan, keep, link.plan.entry))


def _again(part: Part, keep: bool, entry: float) -> Part:
    """Return a part that the backward pass computes again: its input stays, and its products if so configured."""
    kept = {"input": entry, "products": part.products if keep else 0.0}
    there = _sum(kept)
    forward = Phase(there, max(there, part.forward.peak), part.forward.made)
    second = part.again or part.forward
    # Kept products are given up as they are used, and not made; nor is an input that the part keeps as it is.
    spared = kept["products"] + (entry if part.keeps_entry else 0.0)
    anew = Phase(second.net - spared, max(0.0, second.peak - spared), second.made - spared)
    freed = held(0.0 if part.keeps_entry else -entry)
    return Part(kept, forward, anew + part.backward + freed, waiting=part.waiting)


def _sum(sizes: Mapping[str, float]) -> float:
    return float(sum(sizes.values()))


def _residual(z: Sizes) -> float:
    return float(z.residual * z.tokens * z.hidden)


def _one_block(config: RunConfig) -> Graph:
    # One block represents all: models of thousands of blocks are planned as quickly.
    return graph_of(config.model.model_copy(update={"layers": 1}))


def _numbers(operations: Sequence[Operation]) -> int:
    """Return the number of parameters of the operations together."""
    return sum({p.name: p.size for one in operations for p in one.parameters.values()}.values())


def _outside(graph: Graph) -> tuple[list[Operation], list[Operation]]:
    """List the operations before and after the blocks, but for the look-up and the head, which have their own rules."""
    places = [number for number, one in enumerate(graph.operations) if one.layer is not None]
    plain = [one for one in graph.operations[: places[0]] if one.part != "embedding"]
    return plain, [one for one in graph.operations[places[-1] + 1 :] if one.part != "head"]


@dataclass(frozen=True)
class Passes:
    """Forward and backward pass of one micro-batch. saved: by part. largest: the one tensor of the head's."""

    forward: Phase
    head: Phase
    backward: Phase
    saved: Mapping[str, float]
    largest: float

    @property
    def whole(self) -> Phase:
        """The three passes in a row."""
        return self.forward + self.head + self.backward


def passes(config: RunConfig, z: Sizes, later: bool = False, shards: int = 1) -> Passes:
    """Return the passes of one micro-batch, from no gradients to all of them, or its part of them.

    later: there are gradients already that new ones are added to: an eager program frees each new one as it is added, a
    compiled one hands all of them over at its end. shards: one in `shards` of a block's gradients stays on this device.
    """
    recompute, layers = config.recompute, config.model.layers
    D, graph = _residual(z), _one_block(config)
    table_numbers = _numbers([one for one in graph.operations if one.part == "embedding"])
    before, after = (
        [
            _chosen_again(link, recompute.keep_products, recompute.chosen)
            for link in parts_of(z, graph, operations, config.attention.document_mask, recompute.chosen)
        ]
        for operations in _outside(graph)
    )
    kept = block(config, z, frozenset())
    again = block(config, z, recompute.chosen) if recompute.chosen else kept
    groups, rest = divmod(layers, recompute.every)
    # Block by block, whole logits are computed outside of any program.
    outside = z.fused and not z.whole and config.loss.chosen.whole
    top = head(replace(z, fused=False) if outside else z, config.loss, config.model.tied)
    leaves = 1.0 if later and not z.whole else 1 - 1 / shards

    forward = held(D) + _forward(before) + (kept.forward.times(recompute.every - 1) + again.forward).times(groups)
    # The final norm's output is the head's input; in one program it is never there but as the head keeps it, nor where
    # the head reads it without a cast.
    normed = 0.0 if z.whole or (z.shares and not z.fused) else D
    spared, final = _spared(config, z), _final_spared(config, z)
    forward += kept.forward.times(rest) + _forward(after) + held(normed - spared - final)
    table = float(z.stream * table_numbers)
    # A library's head that casts has its own copy of it, so that it goes with the forward pass.
    copied = held(-normed) if config.loss.of_library and z.casts else Phase()
    backward = held(-normed - copied.net) if z.casts or not config.loss.chosen.whole else Phase()
    backward += _backward(after) + held(final - D)
    # In a compiled program the gradient that a block is given stays beside the one that it makes.
    given = D if z.fused else 0.0
    of_kept, of_again = (one.backward.beside(given) + held(-leaves * one.gradients) for one in (kept, again))
    backward += of_kept.times(rest) + (of_again + of_kept.times(recompute.every - 1)).times(groups)
    backward += _backward(before)
    # The look-up's gradient, a table of its own; a tied head's is added to it.
    backward += held(table) + top.late + held(-table if config.model.tied else 0.0) + held(-D)
    backward += held(spared)
    backward += held(-leaves * z.stream * table_numbers * (1 if config.model.tied else 2))
    # Tokens, for the look-up's gradient; the tables in the stream dtype, once for all blocks.
    saved: dict[str, float] = {"embedding": 8.0 * z.tokens}
    for one, count in ((again, groups), (kept, layers - groups)):
        for name, size in one.saved.items():
            saved[name] = saved.get(name, 0.0) + count * size
    for link in (*before, *after):
        if link.plan:
            saved[link.name] = saved.get(link.name, 0.0) + _sum(link.plan.saved)
    saved[INPUTS] += D
    rotated = {one.part for one in graph.block() if one.kind == "rope"}
    if not z.fused and not recompute.chosen & {*rotated, "block"}:
        for name in rotated:
            saved[name] += float(z.of_tables * z.length * config.model.head_dim)
    saved[INPUTS] -= spared + final
    saved["head and loss"] = _sum(top.saved)
    return Passes(forward, top.forward + copied + top.backward, backward, saved, top.logits)


def _forward(links: Sequence[Link]) -> Phase:
    return sum((link.plan.forward for link in links if link.plan), Phase())


def _backward(links: Sequence[Link]) -> Phase:
    return sum((link.plan.backward for link in reversed(links) if link.plan), Phase())


@lru_cache(maxsize=16)
def _of_state(model: ModelConfig, optim: OptimConfig, precision: PrecisionConfig) -> tuple[int, float]:
    """Return the number of parameters, and the bytes of weights, gradients and moments, counted once a model."""
    config = RunConfig().model_copy(update={"model": model, "optim": optim, "precision": precision})
    return parameter_count(model), state_bytes(config)


def optimizer_working(config: RunConfig, z: Sizes) -> float:
    """Return bytes that the update holds for itself, and what the norms of a step need where they are recorded.

    AdamW a list operation at a time: the square root of a group's second moments (torch/optim/adam.py,
    `_multi_tensor_adamw`). 8-bit: the largest tensor's moments, in FP32. Otherwise what its rule holds for the largest
    tensor. Norms: the weights before, and the updates.
    """
    model, optim = config.model, config.optim
    # One block represents all.
    small = config.model_copy(update={"model": model.model_copy(update={"layers": 1})})
    parameters, rules = graph_of(small.model).parameters, update_rules(small)
    by_group: dict[str, float] = {}
    working = 0.0
    for name, parameter in parameters.items():
        size = float(z.stream * parameter.size)
        if rules[name].working:
            working = max(working, rules[name].working * size)
        elif not optim.chosen.fused:
            working = max(working, 2 * size)
        elif optim.fused is False:
            times = model.layers if name.startswith("blocks.") else 1
            by_group[parameter.group] = by_group.get(parameter.group, 0.0) + times * size
    working = max(working, *by_group.values(), 0.0)
    count, _ = _of_state(model, optim, config.precision)
    norms = 2.0 * z.stream * count if config.log.norms_every else 0.0
    return max(working + norms / 2, norms)


def is_sharded(config: RunConfig) -> bool:
    """Return whether the run cuts weights over ranks (`parallel.strategy` = fsdp)."""
    return getattr(config.parallel, "strategy", "ddp") == "fsdp"


def _whole_gradients(config: RunConfig) -> bool:
    """Return whether a sharded rank keeps whole gradients until its last micro-batch, which alone is reduced."""
    return config.train.accumulation > 1 and not getattr(config.parallel, "reduce_every_micro_batch", False)


def _spared(config: RunConfig, z: Sizes) -> float:
    """Return the bytes of the first block's sum after attention, made again from the two terms beside it."""
    recompute = config.recompute
    if not (z.whole and z.casts) or ("block" in recompute.chosen and recompute.every == 1):
        return 0.0
    return float((z.residual - z.operand) * z.tokens * z.hidden)


def _final_spared(config: RunConfig, z: Sizes) -> float:
    """Return the bytes of the last block's output, made again with a recomputed block; the final norm reads it."""
    recompute = config.recompute
    again = "block" in recompute.chosen and config.model.layers % recompute.every == 0
    return _residual(z) if z.whole and again else 0.0


def memory(config: RunConfig, gpu: Gpu, *, sharded: bool | None = None, autocast: bool = False) -> Memory:
    """Return the memory that a step of this run needs on each device.

    sharded: weights, gradients and moments are divided over `train.ranks` (FSDP: Zhao et al. 2023, arXiv 2304.11277),
    each block's weights gathered when it is computed, the next one's beside it; None: as configured. autocast: see
    core/plan/sizes.py.
    """
    z = sizes_of(config, gpu, autocast)
    (count, all_state), ranks = _of_state(config.model, config.optim, config.precision), config.train.ranks
    sharded = is_sharded(config) if sharded is None else sharded
    shards = ranks if sharded else 1
    left = 1 if _whole_gradients(config) else shards
    weights = float(z.stream * count)
    moments = all_state - 2 * weights
    tables = 2 * 8.0 * config.train.sequence_length * config.model.head_dim / 2
    state = {"weights": weights / shards, "moments": moments / shards, "buffers": tables}
    if gpu.cuda:
        # One for the thread of the forward pass and one for autograd's (torch/aten/src/ATen/cuda/CublasHandlePool.cpp).
        state["cuBLAS workspaces"] = 2.0 * gpu.workspace
    in_buckets = weights if ranks > 1 and not sharded else 0.0
    if in_buckets:
        # Gradients are added up in DDP's buckets (`gradient_as_bucket_view`), which stay.
        state["gradients, in communication buckets"] = in_buckets
    gathered = 0.0
    if sharded:
        graph = _one_block(config)
        gathered = 2.0 * z.stream * max(_numbers(graph.block()), _numbers(graph.operations[:1]))
    of_one = passes(config, z, bool(in_buckets), left)
    candidates = {"first micro-batch": of_one.whole.peak}
    if config.train.accumulation > 1:
        candidates["later micro-batch"] = weights / left - in_buckets + passes(config, z, True, left).whole.peak
    candidates["optimizer"] = (weights + optimizer_working(config, z)) / shards - in_buckets
    where = max(candidates, key=lambda name: candidates[name])
    above = candidates[where] + gathered
    activations = dict(of_one.saved)
    gradients = weights / left - in_buckets
    outside = {}
    peak = _sum(state) + above
    if gpu.cuda:
        outside = {"CUDA context": CONTEXT + (NCCL if ranks > 1 else 0.0), "allocator's reserve": RESERVE * peak}
    working = above - _sum(activations)
    return Memory(state, gradients, activations, working, peak, where, outside)
