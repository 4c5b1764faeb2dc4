"""Activation checkpointing: the backward pass recomputes the inner tensors of parts of the model.

The inputs of a part are kept, its inner tensors are not (Chen et al. 2016, arXiv 1604.06174). Selective checkpointing
also keeps the results of matrix products, so that only cheap operations are recomputed (Korthikanti et al. 2022,
arXiv 2205.05198). The same operations give the same bits, so the twin does not recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lockstep.core.config.schema import PARTS, RecomputeConfig
from lockstep.core.model.names import layer_of
from lockstep.torch_backend.model import (
    MLP,
    NORMS,
    Attention,
    Block,
    Embedding,
    Positions,
    Rope,
    SwiGLU,
    Tap,
    Transformer,
    no_tap,
)
from lockstep.torch_backend.precision import Policy

Run = Callable[..., Any]

PART_OF: dict[type[nn.Module], str] = {
    Embedding: "embedding",
    Positions: "embedding",
    **dict.fromkeys(NORMS.values(), "norms"),
    Attention: "attention",
    SwiGLU: "mlp",
    MLP: "mlp",
    Block: "block",
}

# Matrix products as autograd dispatches them: those of linear layers, attention kernels and FP8.
PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._scaled_mm.default,
        torch.ops.lockstep.product_by_fp32.default,
        torch.ops.lockstep.product_by_onednn.default,
        torch.ops.lockstep.wide_product.default,
        torch.ops.lockstep.attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def apply_recompute(model: Transformer, config: RecomputeConfig, tapped: bool = True) -> None:
    """Make the backward pass recompute the configured parts (`recompute.parts`, `.every`).

    The `forward` of each part is wrapped in place, compiled or not. tapped: recompute whole blocks also in a program
    with taps; if False, such a program keeps their tensors.
    """
    modules: Iterable[tuple[str, Any]] = model.named_modules()
    for name, module in modules:
        part = next((part for kind, part in PART_OF.items() if isinstance(module, kind)), None)
        if part not in config.chosen or not _is_chosen(layer_of(name), config):
            continue
        again = _again(module.forward, config.keep_products)
        module.forward = again if tapped or part != "block" else _untapped(again, module.forward)


def _is_chosen(layer: int | None, config: RecomputeConfig) -> bool:
    """Return whether a block is recomputed; modules outside the blocks (None) always are."""
    return layer is None or layer % config.every == config.every - 1


def _again(forward: Run, keep_products: bool) -> Run:
    # preserve_rng_state: the model draws no random numbers.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if keep_products:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def again(*arguments: Any) -> Any:
        return checkpoint(forward, *arguments, **options) if torch.is_grad_enabled() else forward(*arguments)

    return again


def _untapped(again: Run, forward: Run) -> Run:
    """Return a block's `forward` that recomputes (`again`) only in a program without taps."""

    def block(x_BSD: Tensor, rope: Rope, policy: Policy, tap: Tap, name: str) -> Any:
        return (again if tap is no_tap else forward)(x_BSD, rope, policy, tap, name)

    return block


def in_force(config: RecomputeConfig) -> str:
    """Describe the recomputed parts, for the table that is printed at start."""
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
