"""AdamW with decoupled decay by parameter group. Twin: jax_backend/optim.py.

torch rounds in this order (torch/optim/adamw.py, foreach), each line one rounded FP32 operation a factor::

    p ← p · (1 − lr·λ)
    m ← m + (1 − β₁)(g − m)
    v ← β₂·v + (1 − β₂)·g²
    p ← p − lr/(1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

λ is `weight_decay` for the group `matrices` and 0 for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from core.backend import State
from core.config import OptimConfig
from core.names import GROUPS, group_of

MOMENTS = ("exp_avg", "exp_avg_sq")


def decay_of_group(optim: OptimConfig, group: str) -> float:
    """Weight decay λ of a parameter group."""
    return optim.weight_decay if group == "matrices" else 0.0


def build_optimizer(optim: OptimConfig, parameters: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
    """AdamW over the non-empty groups of core/names.py; each torch group carries its name under `group`."""
    groups = []
    for group in GROUPS:
        members = [p for name, p in parameters.items() if group_of(name) == group]
        if members:
            groups.append({"params": members, "group": group, "weight_decay": decay_of_group(optim, group)})
    return torch.optim.AdamW(
        groups, lr=optim.peak_lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=0.0, foreach=True
    )


def global_norm(grads: Iterable[Tensor]) -> Tensor:
    """L2 norm over all gradients, a float64 scalar, accumulated in FP64.

    `torch.nn.utils.get_total_norm` accumulates in FP32: on the CPU that is off by up to 2,400 ulp (3e-4) for a million
    elements, because squares below half an ulp of the running sum vanish.
    """
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]))


def clip_coefficient(optim: OptimConfig, norm: Tensor) -> Tensor:
    """min(1, limit / (norm + 1e-6)), the 1e-6 as in `torch.nn.utils.clip_grad_norm_`; 1 where clipping is off."""
    if not optim.clip_norm:
        return torch.ones_like(norm)
    return (optim.clip_norm / (norm + 1e-6)).clamp(max=1.0)


def read_moments(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """Moments by kind and canonical name; zeros for parameters that have not been stepped yet."""
    return {
        kind: {name: optimizer.state[p].get(kind, torch.zeros_like(p)).detach() for name, p in parameters.items()}
        for kind in MOMENTS
    }


def write_moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: State) -> None:
    """Put a canonical state's moments and step count into the optimizer. Raises KeyError for a missing name."""
    for name, p in parameters.items():
        entry = {kind: torch.tensor(state.optimizer[kind][name]).to(device=p.device, dtype=p.dtype) for kind in MOMENTS}
        optimizer.state[p] = {"step": torch.tensor(float(state.updates)), **entry}
