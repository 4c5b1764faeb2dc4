"""Loss heads of other libraries. Twin: jax_backend/kernels/library_heads.py.

- `loss.head` = `torch`: torch.nn.functional.linear_cross_entropy (torch 2.13)
- `liger`: Liger-Kernel's fused linear cross-entropy
- `cce`: cut-cross-entropy, without its filter, which would omit small gradients

Each takes operands in the operand dtype and returns per-token losses; none exposes its logits.

A library computes gradients in the operand dtype. The gradient of a per-token loss is about 1 / tokens, which bf16
rounds by up to 0.4 %, for all tokens in the same direction. Therefore the library receives gradients scaled such that
the largest is 1, and its results are scaled back in the stream dtype. Loss weights of 0 and 1 are then exact.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.core.components.loss_heads import LOSS_HEADS
from lockstep.core.config.schema import LossConfig
from lockstep.core.errors import UserError
from lockstep.torch_backend.kernels import one_kernel
from lockstep.torch_backend.loss import weighted_mean
from lockstep.torch_backend.precision import Policy


@dataclass(frozen=True)
class Library:
    """A library's loss head.

    losses: (x (N, D), weight (V, D), targets (N,), settings) → losses (N,). missing: device → the reason why the head
    cannot run there, or None.
    """

    losses: Callable[[Tensor, Tensor, Tensor, LossConfig], Tensor]
    missing: Callable[[torch.device], str | None]


def _torch(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, loss: LossConfig) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=loss.chunk)
    losses: Tensor = F.linear_cross_entropy(x_ND, weight_VD, targets_N, reduction="none", options=options)
    return losses


def _liger(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, loss: LossConfig) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    losses: Tensor = liger_fused_linear_cross_entropy(
        x_ND,
        weight_VD,
        targets_N,
        reduction="none",
        lse_square_scale=loss.z_loss,
        accum_dtype=torch.float32,
    )
    return losses


def _cce(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, loss: LossConfig) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    losses: Tensor = linear_cross_entropy(x_ND, weight_VD, targets_N, reduction="none", filter_eps=None, impl="cce")
    return losses


def _older_torch(device: torch.device) -> str | None:
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return None
    return f"needs torch 2.13, and this is {torch.__version__}; take 'chunked'"


def _not_installed(head: str, device: torch.device, interpreted: bool = False) -> str | None:
    if device.type != "cuda" and not interpreted:
        return "is made of Triton kernels and needs CUDA; take 'chunked'"
    module, package = LOSS_HEADS[head].package or ("", "")
    return f"needs {package}: pip install 'lockstep[{head}]'" if find_spec(module) is None else None


def _liger_missing(device: torch.device) -> str | None:
    # Triton's interpreter runs Liger's kernel on the CPU. It is slow, but sufficient for a study of roundings
    # (scripts/studies/library_heads.py).
    return _not_installed("liger", device, bool(os.environ.get("TRITON_INTERPRET")))


# Library heads by their name in core/components/loss_heads.py.
LIBRARY_HEADS: dict[str, Library] = {
    "torch": Library(_torch, _older_torch),
    "liger": Library(_liger, _liger_missing),
    "cce": Library(_cce, partial(_not_installed, "cce")),
}


def check_head(loss: LossConfig, device: torch.device) -> None:
    """Raise UserError, in one line, if the configured loss head cannot run on this device."""
    if loss.of_library:
        why = LIBRARY_HEADS[loss.head].missing(device)
    else:
        why = one_kernel.missing(device) if loss.chosen.one_kernel else None
    if why:
        raise UserError(f"loss.head = '{loss.head}' {why}")


class _Scaled(torch.autograd.Function):
    """The identity; its backward pass multiplies the gradient by `factor`, a scalar."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        return grads[0] * factor.to(grads[0].dtype), None


def library_loss(
    x_BSD: Tensor,
    weight_VD: Tensor,
    targets_BS: Tensor,
    weights_BS: Tensor,
    total: Tensor,
    policy: Policy,
    loss: LossConfig,
    tap: Callable[[str, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return Σ weight·loss / total, a float64 scalar, and the per-token losses (B, S). tap: receives only `nll`."""
    share = (weights_BS.max().double() / total.double()).detach()
    nll_BS = tap("nll", library_nll(x_BSD, weight_VD, targets_BS, share, policy, loss))
    return weighted_mean(nll_BS, weights_BS, total), nll_BS


def library_nll(
    x_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor, largest: Tensor, policy: Policy, loss: LossConfig
) -> Tensor:
    """Return per-token losses (B, S) in the stream dtype. largest: the largest gradient of any loss, a scalar."""
    scale = torch.where(largest > 0, 1 / largest, 1.0)
    x = _Scaled.apply(x_BSD.flatten(0, 1).to(policy.stream), 1 / scale).to(policy.operand)
    weight = _Scaled.apply(weight_VD, 1 / scale).to(policy.operand)
    losses = LIBRARY_HEADS[loss.head].losses(x, weight, targets_BS.flatten(), loss).to(policy.stream)
    nll_BS: Tensor = _Scaled.apply(losses, scale).unflatten(0, targets_BS.shape)
    return nll_BS
