"""Time of a step from a stated roofline: products at what large products reach, all else at the memory's bandwidth.

    products    FLOPs / (peak · share), shares in core/plan/gpus.py; the head's in the operand, blocks' in FP8 if so
    attention   3.5 forward passes (2 + 5 products, Dao 2023) at its kernel's share of the peak
                both as much slower as they were measured to be in a step at the GPU's limit of power, where they were
    recompute   the forward FLOPs of what is computed again, at the same rates
    memory      every tensor that a pass makes is written once and read once (core/plan/parts.py lists them);
                where FP8's scales are of the numbers that are cast, these are read once more before, for the largest
    optimizer   weights and moments read and written, gradients read (core/model/budget.py); Muon's products likewise
    clipping    gradients read for the norm, and read and written
    exchange    ring all-reduce: 2 (n − 1) / n · bytes / link (Patarin & Yuan 2009); what the last micro-batch's
                backward pass does not cover, and the last bucket, are exposed

Nothing for launches, gaps between kernels, data or checkpoints. Where a GPU's step was not measured it is a floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache

from lockstep.core.components.precision import FORMATS
from lockstep.core.config.schema import ModelConfig, OptimConfig, PrecisionConfig, RunConfig
from lockstep.core.model.budget import computed_again, optimizer_bytes, parameter_count, update_flops
from lockstep.core.model.families import graph_of
from lockstep.core.model.graph import Operation
from lockstep.core.plan.gpus import Gpu
from lockstep.core.plan.memory import passes
from lockstep.core.plan.sizes import sizes_of

# The share of a GPU's bandwidth that simple kernels reach: an assumption (copies reach 0.9 to 0.93 on A100 and H100).
BANDWIDTH_SHARE = 0.9
# GPUs in one node, and bytes/s a GPU has to other nodes in one direction: 400 Gbit/s a GPU, an assumption.
NODE, NETWORK = 8, 50e9
_NARROW = {"bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Seconds:
    """The seconds of one step on each device, by part."""

    products: float
    attention: float
    recomputed: float
    memory: float
    optimizer: float
    exchange: float

    @property
    def step(self) -> float:
        """The whole step."""
        return sum(getattr(self, field.name) for field in fields(self))


def seconds(config: RunConfig, gpu: Gpu, *, autocast: bool = False) -> Seconds | None:
    """Return the time of a step; None where the device's rates are not known."""
    z = sizes_of(config, gpu, autocast)
    operand = config.precision.operand
    rate = gpu.rate(operand)
    if rate is None:
        return None
    attention_rate = gpu.attention_rate(operand, z.kernel.name)
    narrow = gpu.rate("fp8") or rate
    train, layers = config.train, config.model.layers
    # One block represents all: models of thousands of blocks are planned as quickly.
    graph = graph_of(config.model.model_copy(update={"layers": 1}))
    in_fp8 = _layers_in_fp8(config.model, config.precision)

    def linear(one: Operation) -> float:
        """Return seconds of a token's forward products with weights, in all blocks or outside them."""
        count = layers if one.layer is not None else 1
        in_narrow = in_fp8.get(one.id, 0) if one.layer is not None else 0
        return one.flops_at(0) * (in_narrow / narrow + (count - in_narrow) / rate)

    def scores(one: Operation) -> float:
        """Return the seconds of its products that grow with the sequence."""
        count = layers if one.layer is not None else 1
        return count * (one.flops_at(train.sequence_length) - one.flops_at(0)) / attention_rate

    tokens = train.batch_size * train.sequence_length / train.ranks
    products = 3 * tokens * sum(map(linear, graph.operations))
    attention = 3.5 * tokens * sum(map(scores, graph.operations))
    again = [] if config.recompute.keep_products else computed_again(config)
    share = (layers // config.recompute.every) / layers
    recomputed = tokens * share * sum(linear(one) + scores(one) for one in again)
    bandwidth = gpu.bandwidth * BANDWIDTH_SHARE
    moved = 2 * passes(config, z).whole.made * train.accumulation
    moved += _read_for_scales(config, in_fp8, tokens)
    weights = _weights(config.model, z.stream)
    own_products, update = _of_update(config.model, config.optim, config.precision)
    own_rate = gpu.rate(config.optim.ns_dtype) or rate
    optimizer = (update + 3 * weights) / bandwidth + own_products / own_rate
    last_backward = (products + attention) * 2 / 3 / train.accumulation
    return Seconds(
        products,
        attention,
        recomputed,
        moved / bandwidth,
        optimizer,
        _exposed(config, gpu, weights, z.stream, last_backward),
    )


def _read_for_scales(config: RunConfig, in_fp8: Mapping[str, int], tokens: float) -> float:
    """Return bytes that are read for FP8's scales: of inputs, outputs' gradients and weights; none of delayed ones.

    An input of several layers is read once.
    """
    if config.precision.fp8 in (None, "delayed"):
        return 0.0
    graph = graph_of(config.model.model_copy(update={"layers": 1}))
    narrow, wide = FORMATS[config.precision.operand].bytes, FORMATS[config.precision.stream].bytes
    read, inputs = 0.0, dict[str, float]()
    for one in graph.linears.values():
        if count := in_fp8.get(one.id, 0):
            (tap,) = one.reads.values()
            inputs[tap] = max(inputs.get(tap, 0.0), float(count * math.prod(graph.by_tap[tap].width)))
            weights = sum(parameter.size for parameter in one.parameters.values())
            read += count * (narrow * tokens * math.prod(one.width) + config.train.accumulation * wide * weights)
    return read + narrow * tokens * sum(inputs.values())


@lru_cache(maxsize=16)
def _weights(model: ModelConfig, stream: int) -> float:
    return float(stream * parameter_count(model))


@lru_cache(maxsize=16)
def _layers_in_fp8(model: ModelConfig, precision: PrecisionConfig) -> dict[str, int]:
    """Count, by stage id, the blocks in which each linear layer is in FP8."""
    found: dict[str, int] = {}
    if precision.fp8 is not None:
        for module, one in graph_of(model).linears.items():
            found[one.id] = found.get(one.id, 0) + precision.is_fp8(module)
    return found


@lru_cache(maxsize=16)
def _of_update(model: ModelConfig, optim: OptimConfig, precision: PrecisionConfig) -> tuple[float, float]:
    """Return FLOPs of the optimizer's own products and bytes of the update, counted once a model."""
    config = RunConfig().model_copy(update={"model": model, "optim": optim, "precision": precision})
    return update_flops(config), optimizer_bytes(config)


def _exposed(config: RunConfig, gpu: Gpu, weights: float, wide: int, covered: float) -> float:
    ranks = config.train.ranks
    if ranks == 1:
        return 0.0
    link = gpu.link if ranks <= NODE else NETWORK
    size = weights * _NARROW.get(config.parallel.gradient_dtype, wide) / wide
    ring = 2 * (ranks - 1) / ranks / link
    last = min(size, config.parallel.bucket_mb * 2**20) * ring
    return max(last, size * ring - covered)
