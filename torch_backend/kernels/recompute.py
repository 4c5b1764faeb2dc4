"""Activation checkpointing: parts of the model whose inner tensors the backward pass computes again.

A part's inputs are kept, what it makes on the way is not (Chen et al. 2016, arXiv 1604.06174). Selective: what its
matrix products gave is kept as well, so that only the cheap rest is computed again (Korthikanti et al. 2022,
arXiv 2205.05198). The same operations give the same bits: no twin knows of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lockstep.core.config.schema import PARTS, RecomputeConfig

Run = Callable[..., Any]

# What a matrix product is by the time autograd sees it: linear layers, attention kernels, FP8.
PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._scaled_mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)
if torch.backends.mkldnn.is_available():
    # FP32 products on the CPU (torch_backend/precision.py, `by_onednn`).
    PRODUCTS |= {torch.ops.mkldnn._linear_pointwise.default}


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True)
class Recompute:
    """Which parts of one block, or of the embedding, are computed again."""

    parts: frozenset[str]
    keep_products: bool

    def __call__(self, part: str, function: Run, *arguments: Any) -> Any:
        """`function(*arguments)`, kept or computed again in the backward pass as is configured for `part`."""
        if part not in self.parts or not torch.is_grad_enabled():
            return function(*arguments)
        # The model draws no random numbers. Stopping early would leave out taps behind the last tensor that is needed.
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if self.keep_products:
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(function, *arguments, **options)


KEPT = Recompute(frozenset(), keep_products=False)


def in_force(config: RecomputeConfig) -> str:
    """What is computed again, for the table at start."""
    parts = [part for part in PARTS if part in config.chosen]
    said = ", ".join(parts)
    if config.every > 1:
        said += f" in every block number {config.every}"
    if config.keep_products:
        said += ", but for matrix products"
    if config.memory_budget < 1:
        budget = f"the compiler keeps {config.memory_budget:g} of the activations"
        said = f"{said}; {budget}" if said else budget
    return said or "nothing"


def of_layer(config: RecomputeConfig, layer: int | None) -> Recompute:
    """The plan of a block, or of what stands outside the blocks (None)."""
    chosen = layer is None or layer % config.every == config.every - 1
    return Recompute(config.chosen if chosen else frozenset(), config.keep_products)
