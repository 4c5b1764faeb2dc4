"""Time of a step from a stated roofline: products at what large products reach, all else at the memory's bandwidth.

    products    FLOPs / (peak · share), shares in core/plan/gpus.py; the head's in the operand, blocks' in FP8 if so
    attention   3.5 forward passes (2 + 5 products, Dao 2023) at its kernel's share of the peak
    recompute   the forward FLOPs of what is computed again, at the same rates
    memory      every tensor that a pass makes is written once and read once (core/plan/parts.py says which are made)
    optimizer   weights and moments read and written, gradients read (core/model/budget.py); Muon's products likewise
    clipping    gradients read for the norm, and read and written
    exchange    ring all-reduce: 2 (n − 1) / n · bytes / link (Patarin & Yuan 2009); what the last micro-batch's
                backward pass does not cover, and the last bucket, are exposed

Nothing for launches, gaps between kernels, data or checkpoints: a floor with honest rates, not a promise.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from lockstep.core.config.schema import BLOCK_LINEARS, ModelConfig, OptimConfig, PrecisionConfig, RunConfig
from lockstep.core.model.budget import forward_products, newton_schulz_flops, optimizer_bytes, parameter_count
from lockstep.core.plan.gpus import Gpu
from lockstep.core.plan.memory import passes
from lockstep.core.plan.sizes import sizes_of

# What simple kernels reach of a GPU's bandwidth: an assumption (copies reach 0.9 to 0.93 on A100 and H100).
BANDWIDTH_SHARE = 0.9
# GPUs in one node, and bytes/s a GPU has to other nodes in one direction: 400 Gbit/s a GPU, an assumption.
NODE, NETWORK = 8, 50e9
_NARROW = {"bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Seconds:
    """Of one step on each device."""

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
    """Time of a step; None where the device's rates are not known."""
    z = sizes_of(config, gpu, autocast)
    operand = config.precision.operand
    rate = gpu.rate(operand)
    if rate is None:
        return None
    attention_rate = gpu.peaks[operand] * gpu.attention.get(z.kernel, min(gpu.attention.values()))
    narrow = gpu.rate("fp8") or rate
    train, layers = config.train, config.model.layers
    of = forward_products(config.model.model_copy(update={"layers": 1}), train.sequence_length)
    tokens = train.batch_size * train.sequence_length / train.ranks
    in_fp8 = _layers_in_fp8(config.precision, layers)
    linear = {n: of[n] * (in_fp8[n] / narrow + (layers - in_fp8[n]) / rate) for n in BLOCK_LINEARS}
    products = 3 * tokens * (sum(linear.values()) + of["head"] / rate)
    attention = 3.5 * tokens * layers * of["attention"] / attention_rate
    recomputed = tokens * _again(config, linear, layers * of["attention"] / attention_rate)
    bandwidth = gpu.bandwidth * BANDWIDTH_SHARE
    moved = 2 * passes(config, z).whole.made * train.accumulation
    weights = _weights(config.model, z.stream)
    by_muon, update = _of_update(config.model, config.optim, config.precision)
    ns_rate = gpu.rate(config.optim.ns_dtype) or rate
    optimizer = (update + 3 * weights) / bandwidth + by_muon / ns_rate
    last_backward = (products + attention) * 2 / 3 / train.accumulation
    return Seconds(
        products,
        attention,
        recomputed,
        moved / bandwidth,
        optimizer,
        _exposed(config, gpu, weights, z.stream, last_backward),
    )


@lru_cache(maxsize=16)
def _weights(model: ModelConfig, stream: int) -> float:
    return float(stream * parameter_count(model))


@lru_cache(maxsize=16)
def _layers_in_fp8(precision: PrecisionConfig, layers: int) -> dict[str, int]:
    """In how many blocks each linear layer is in FP8."""
    if precision.fp8 is None:
        return dict.fromkeys(BLOCK_LINEARS, 0)
    return {name: sum(precision.is_fp8(f"blocks.{i}.{name}") for i in range(layers)) for name in BLOCK_LINEARS}


@lru_cache(maxsize=16)
def _of_update(model: ModelConfig, optim: OptimConfig, precision: PrecisionConfig) -> tuple[float, float]:
    """FLOPs of Muon's products and bytes of the update, counted once a model."""
    config = RunConfig().model_copy(update={"model": model, "optim": optim, "precision": precision})
    return newton_schulz_flops(config), optimizer_bytes(config)


def _again(config: RunConfig, linear: dict[str, float], attention: float) -> float:
    """Seconds a token of what is computed again, as lockstep.core.model.budget.recomputed_flops_per_token counts it."""
    recompute = config.recompute
    parts = recompute.chosen
    share = (config.model.layers // recompute.every) / config.model.layers
    total = 0.0
    has_attention = bool(parts & {"attention", "block"})
    if not recompute.keep_products:
        total += sum(linear[f"attn.{name}_proj"] for name in "qkv") if has_attention else 0.0
        total += linear["mlp.gate_proj"] + linear["mlp.up_proj"] if parts & {"mlp", "block"} else 0.0
        total += linear["attn.o_proj"] if "block" in parts else 0.0
        total += attention if has_attention else 0.0
    return share * total


def _exposed(config: RunConfig, gpu: Gpu, weights: float, wide: int, covered: float) -> float:
    ranks = config.train.ranks
    if ranks == 1:
        return 0.0
    link = gpu.link if ranks <= NODE else NETWORK
    size = weights * _NARROW.get(config.parallel.gradient_dtype, wide) / wide
    ring = 2 * (ranks - 1) / ranks / link
    last = min(size, config.parallel.bucket_mb * 2**20) * ring
    return max(last, size * ring - covered)
