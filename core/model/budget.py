"""Parameters, FLOPs in the three usual conventions, bytes, and hardware peaks: the costs of a step."""

from __future__ import annotations

import math

from lockstep.core.components.precision import FORMATS, POLICIES
from lockstep.core.config.schema import ModelConfig, RunConfig
from lockstep.core.errors import UserError
from lockstep.core.model.families import graph_of
from lockstep.core.model.graph import GROUPS, Operation
from lockstep.core.model.groups import update_rules

_SXM = {"fp8": 1978.9e12, "bf16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12, "fp64": 66.9e12}
# Peaks of dense matrix products in FLOP/s by operand precision, without structured sparsity (1979e12 for H100 in bf16
# is the peak with sparsity). H100 SXM and PCIe: NVIDIA H100 Tensor Core GPU datasheet; H200: NVIDIA H200 datasheet
# (same GPU as H100 SXM).
PEAK_FLOPS: dict[str, dict[str, float]] = {
    "NVIDIA H100 80GB HBM3": _SXM,
    "NVIDIA H100 PCIe": {"fp8": 1513e12, "bf16": 756e12, "tf32": 378e12, "fp32": 51.2e12, "fp64": 51.2e12},
    "NVIDIA H200": _SXM,
}


def parameter_count(model: ModelConfig) -> int:
    """Count the parameters; a tied head counts once. No parameter is allocated."""
    return sum(parameter.size for parameter in graph_of(model).parameters.values())


def parameter_count_by_group(model: ModelConfig) -> dict[str, int]:
    """Count the parameters of each optimizer group; groups without parameters are omitted."""
    counts = dict.fromkeys(GROUPS, 0)
    for parameter in graph_of(model).parameters.values():
        counts[parameter.group] += parameter.size
    return {group: count for group, count in counts.items() if count}


def flops_per_token(model: ModelConfig, sequence_length: int) -> dict[str, float]:
    """Return forward and backward FLOPs per token, in three conventions.

    `6N`:     6 · parameters (Kaplan et al. 2020): two FLOPs per weight forward, four backward, without attention.
    `causal`: 6N + scores and values over the S/2 positions that a token sees on average, 6 · layers · hidden · S.
    `full`:   6N + twice that, over all S positions, as in PaLM's MFU (Chowdhery et al. 2022, appendix B).
    """
    base = 6.0 * parameter_count(model)
    # The backward pass has twice the FLOPs of the forward pass.
    attention = 3.0 * sum(_of_scores(one, sequence_length) for one in graph_of(model).operations)
    return {"6N": base, "causal": base + attention, "full": base + 2 * attention}


def _of_scores(operation: Operation, length: int) -> float:
    """Return the forward FLOPs per token of the products whose size grows with the sequence."""
    return operation.flops_at(length) - operation.flops_at(0)


def forward_products(model: ModelConfig, sequence_length: int) -> dict[str, float]:
    """Return the forward FLOPs per token of matrix products, by tap; look-ups, norms and biases are not counted."""
    operations = graph_of(model).operations
    return {one.tap: flops for one in operations if (flops := one.flops_at(sequence_length))}


def recomputed_flops_per_token(config: RunConfig) -> dict[str, float] | None:
    """Return the FLOPs per token that the backward pass recomputes, in the conventions of `flops_per_token`.

    These products count, in each block that `recompute.every` selects (norms, activations and look-ups do not count):

    `attention`: q, k and v, and attention: 2·(weights of q, k, v) + 2·hidden·S (causal; `full` twice that, `6N` none).
    `mlp`:       gate and up: 2·(their weights).
    `block`:     both, and attention's output projection, because the second half of the block needs its output.

    The last product of a part (o_proj, down_proj) is not recomputed: the backward pass does not need its output, and
    torch's checkpoint stops before it. With `keep_products`, no product is recomputed, except attention by a kernel
    that is not an operator of torch (flex, fa3). The result is None with a memory budget, because the compiler then
    chooses what to recompute.
    """
    recompute, length = config.recompute, config.train.sequence_length
    if recompute.memory_budget < 1:
        return None
    again = [one for one in computed_again(config) if one.flops_at(length)]
    linears = 0.0 if recompute.keep_products else sum(one.flops_at(0) for one in again)
    repeats = not recompute.keep_products or not config.attention.chosen.kept
    attention = sum(_of_scores(one, length) for one in again) if repeats else 0.0
    blocks = config.model.layers // recompute.every
    return {
        "6N": blocks * linears,
        "causal": blocks * (linears + attention),
        "full": blocks * (linears + 2 * attention),
    }


def computed_again(config: RunConfig) -> list[Operation]:
    """List the operations of one block that are recomputed: those of each part before its last product."""
    block = graph_of(config.model.model_copy(update={"layers": 1})).block()
    chosen = config.recompute.chosen
    found = []
    for part in ("attention", "mlp", "block"):
        members = [one for one in block if part == "block" or one.part == part] if part in chosen else []
        last = max((n for n, one in enumerate(members) if one.flops_at(1)), default=0)
        found += members[:last]
    return found


def peak_flops(device: str, policy: str) -> tuple[str, float] | None:
    """Return (precision, dense peak in FLOP/s) for utilisation under `policy` on `device`; None if it is unknown."""
    precision = (policy in POLICIES and POLICIES[policy].peak) or policy
    peak = PEAK_FLOPS.get(device, {}).get(precision)
    return None if peak is None else (precision, peak)


def mfu(
    model: ModelConfig, sequence_length: int, tokens_per_second: float, device: str, policy: str
) -> dict[str, float]:
    """Return the model FLOP utilisation by convention, relative to `peak_flops`; {} if the peak is unknown."""
    peak = peak_flops(device, policy)
    if peak is None:
        return {}
    flops = flops_per_token(model, sequence_length)
    return {kind: value * tokens_per_second / peak[1] for kind, value in flops.items()}


def hfu(config: RunConfig, tokens_per_second: float, device: str) -> dict[str, float]:
    """Return the hardware FLOP utilisation: `mfu` that also counts recomputed FLOPs.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 6.3. The result is {} if the peak or the recomputed
    FLOPs are unknown.
    """
    length = config.train.sequence_length
    again, peak = recomputed_flops_per_token(config), peak_flops(device, config.precision.policy)
    if again is None or peak is None:
        return {}
    flops = flops_per_token(config.model, length)
    return {kind: (value + again[kind]) * tokens_per_second / peak[1] for kind, value in flops.items()}


def optimizer_bytes(config: RunConfig) -> float:
    """Return the bytes that the update must move: weights and moments are read and written, gradients are read.

    AdamW in FP32: 4 · (2 + 1 + 2 · 2) = 28 per parameter. 8-bit moments take a byte per element and a scale per block;
    Muon's matrices have one moment. Clipping and accumulation are not counted.
    """
    wide = FORMATS[config.precision.stream].bytes
    parameters, total = graph_of(config.model).parameters, 0.0
    for name, rule in update_rules(config).items():
        moment = rule.moment_bytes or wide
        total += parameters[name].size * (3 * wide + 2 * moment * len(rule.moments))
    return total


def state_bytes(config: RunConfig) -> float:
    """Return the bytes of weights, gradients and moments, each once: a lower bound of the memory of a step.

    AdamW in FP32: 4 · (1 + 1 + 2) = 16 per parameter; 8-bit moments and Muon's as in `optimizer_bytes`.
    """
    wide = FORMATS[config.precision.stream].bytes
    # The update moves weights twice, moments twice and gradients once. Add gradients once more, and halve the sum.
    return (optimizer_bytes(config) + wide * parameter_count(config.model)) / 2


def require_memory(config: RunConfig, memory: int) -> None:
    """Raise UserError that names the responsible setting if the run cannot fit into `memory` bytes; 0 is unknown.

    On the CPU it counts weights, gradients, moments, and each block's input for a micro-batch. On other devices it
    counts only the initial weights in FP32, which are computed in host memory. Other memory is not counted, so a run
    that passes may still be too large.
    """
    model, train = config.model, config.train
    count = parameter_count(model)
    tokens = train.micro_batch_size * train.sequence_length
    on_cpu = config.device == "cpu"
    needs = {
        _largest_size(config): (state_bytes(config) if on_cpu else 4.0 * count, f"{count:,} parameters"),
        "train.micro_batch_size": (4.0 * tokens * model.hidden * model.layers * on_cpu, f"{tokens:,} tokens at a time"),
    }
    for key, (needed, what) in needs.items():
        if memory and needed > memory:
            section, _, name = key.partition(".")
            raise UserError(
                f"{key} = {getattr(getattr(config, section), name)}: {what} take at least {needed / 2**30:,.1f} GiB, "
                f"and there are {memory / 2**30:,.1f} GiB"
            )


def _largest_size(config: RunConfig) -> str:
    """Return the setting whose excess over its default adds the most parameters to the model."""
    model, usual = config.model, ModelConfig()
    without = {}
    for name in ("vocab_size", "hidden", "layers", "ffn_hidden"):
        less = min(getattr(model, name), getattr(usual, name))
        without[f"model.{name}"] = parameter_count(model.model_copy(update={name: less}))
    return min(without, key=lambda key: without[key])


def update_flops(config: RunConfig) -> float:
    """Return the FLOPs of the optimizer's matrix products in one update: Muon's Newton–Schulz iterations."""
    parameters = graph_of(config.model).parameters
    return sum(rule.flops(parameters[name].shape, config.optim) for name, rule in update_rules(config).items())


def floor_seconds(config: RunConfig, rates: dict[str, float], bandwidth: float) -> float | None:
    """Return a lower bound of a step's time in seconds: FLOPs / measured rate + bytes / measured bandwidth.

    The FLOPs are those of products only, causal, forward and backward, without recomputation. Linears in FP8 count at
    FP8's rate, other products at the operand format's, and Muon's at the rate of its own format. The bytes are
    `optimizer_bytes`.

    rates: FLOP/s by `fp8`, `bf16`, `fp16`, `tf32`, `fp32`, `fp64`; without an entry, FP8 has the rate of bf16
    (emulation), and TF32 that of FP32. bandwidth: bytes read and written per second. The result is None if a required
    rate is missing.
    """
    operand, own = config.precision.operand, update_flops(config)
    rate = rates.get(operand, rates.get("fp32") if FORMATS[operand].as_read else None)
    own_rate = rates.get(config.optim.ns_dtype) if own else math.inf
    if rate is None or own_rate is None:
        return None
    graph, seconds = graph_of(config.model), 0.0
    for one in graph.operations:
        narrow = one.module in graph.linears and config.precision.is_fp8(one.module or "")
        seconds += one.flops_at(config.train.sequence_length) / (rates.get("fp8", rate) if narrow else rate)
    tokens = config.train.batch_size * config.train.sequence_length
    return 3 * tokens * seconds + own / own_rate + optimizer_bytes(config) / bandwidth
