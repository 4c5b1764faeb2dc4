"""Parameters, FLOPs and hardware peaks: what a step costs, in the field's three conventions."""

from __future__ import annotations

import math

from core.config import ModelConfig
from core.names import GROUPS, group_of, parameter_shapes

# Dense matrix peaks in FLOP/s by operand precision (no structured sparsity: "1979" for H100 is the sparse figure).
# H100 SXM and PCIe: NVIDIA H100 Tensor Core GPU datasheet; H200: NVIDIA H200 datasheet (same GPU as H100 SXM).
PEAK_FLOPS: dict[str, dict[str, float]] = {
    "NVIDIA H100 80GB HBM3": {"bf16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12, "fp64": 66.9e12},
    "NVIDIA H100 PCIe": {"bf16": 756e12, "tf32": 378e12, "fp32": 51.2e12, "fp64": 51.2e12},
    "NVIDIA H200": {"bf16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12, "fp64": 66.9e12},
}


def parameter_count(model: ModelConfig) -> int:
    """Number of parameters; a tied head counts once. Nothing is allocated."""
    return sum(math.prod(shape) for shape in parameter_shapes(model).values())


def parameter_count_by_group(model: ModelConfig) -> dict[str, int]:
    """Number of parameters in each optimizer group, groups without parameters left out."""
    counts = dict.fromkeys(GROUPS, 0)
    for name, shape in parameter_shapes(model).items():
        counts[group_of(name)] += math.prod(shape)
    return {group: count for group, count in counts.items() if count}


def flops_per_token(model: ModelConfig, sequence_length: int) -> dict[str, float]:
    """Forward and backward FLOPs of one token, in three conventions.

    `6N`:     6 · parameters (Kaplan et al. 2020): two FLOPs a weight forward, four backward; attention not counted.
    `causal`: + 6 · layers · hidden · S: scores and values over the S/2 positions that a token sees on average.
    `full`:   + 12 · layers · hidden · S: over all S positions, as PaLM's MFU does (Chowdhery et al. 2022, appendix B).
    """
    base = 6.0 * parameter_count(model)
    attention = 6.0 * model.layers * model.hidden * sequence_length
    return {"6N": base, "causal": base + attention, "full": base + 2 * attention}


def mfu(
    model: ModelConfig, sequence_length: int, tokens_per_second: float, device: str, policy: str
) -> dict[str, float]:
    """Model FLOP utilisation by convention against the dense peak of `device`; empty where the peak is not known."""
    peak = PEAK_FLOPS.get(device, {}).get(policy)
    if peak is None:
        return {}
    return {kind: flops * tokens_per_second / peak for kind, flops in flops_per_token(model, sequence_length).items()}
