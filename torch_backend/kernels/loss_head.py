"""Set the loss head of a model. Twin: jax_backend/kernels/loss_head.py."""

from __future__ import annotations

from torch import Tensor

from lockstep.core.config.schema import LossConfig
from lockstep.torch_backend.kernels.chunked_loss import chunked_loss
from lockstep.torch_backend.kernels.library_heads import library_loss
from lockstep.torch_backend.model import FusedLoss, Tap, Transformer, no_tap
from lockstep.torch_backend.precision import Policy


def apply_loss_head(model: Transformer, loss: LossConfig) -> None:
    """Set the model's loss head from `loss.head`: chunked, a library's, or whole logits."""
    model.fused_loss = (
        None if loss.chosen.whole else _library(loss) if loss.of_library else _chunked(loss, model.logits_cap)
    )


def has_own_head(model: Transformer) -> bool:
    """Return whether the model overrides `logits`, `nll` or `forward`, which a fused loss head never calls."""
    names = ("logits", "nll", "forward")
    return any(getattr(type(model), n) is not getattr(Transformer, n) or n in model.__dict__ for n in names)


def _library(loss: LossConfig) -> FusedLoss:
    def head(
        x_BSD: Tensor,
        weight_VD: Tensor,
        targets_BS: Tensor,
        weights_BS: Tensor,
        total: Tensor,
        policy: Policy,
        tap: Tap,
    ) -> tuple[Tensor, Tensor]:
        return library_loss(x_BSD, weight_VD, targets_BS, weights_BS, total, policy, loss, tap)

    return head


def _chunked(loss: LossConfig, cap: float) -> FusedLoss:
    z_loss, chunk, by_one_kernel = loss.z_loss, loss.chunk, loss.chosen.one_kernel

    def head(
        x_BSD: Tensor,
        weight_VD: Tensor,
        targets_BS: Tensor,
        weights_BS: Tensor,
        total: Tensor,
        policy: Policy,
        tap: Tap,
    ) -> tuple[Tensor, Tensor]:
        # With None in place of a tap, no logits are kept.
        shown = None if tap is no_tap else tap
        inputs = x_BSD, weight_VD, targets_BS, weights_BS, total
        return chunked_loss(*inputs, policy, z_loss, chunk, shown, by_one_kernel, cap)

    return head
