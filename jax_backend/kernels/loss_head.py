"""The loss head of a model, applied to it from outside. Twin: torch_backend/kernels/loss_head.py."""

from __future__ import annotations

from jax import Array

from lockstep.core.config.schema import LossConfig
from lockstep.jax_backend.kernels.library_heads import library_nll
from lockstep.jax_backend.loss import weighted_mean
from lockstep.jax_backend.model import FusedLoss, Tap, Transformer
from lockstep.jax_backend.policy import Policy


def apply_loss_head(model: Transformer, loss: LossConfig) -> None:
    """Replace the model's loss by a library's head if the run chooses one. The twin of `chunked` is whole logits."""
    model.fused_loss = _library(loss) if loss.of_library else None


def _library(loss: LossConfig) -> FusedLoss:
    def head(
        x_BSD: Array, weight_VD: Array, targets_BS: Array, weights_BS: Array, total: Array, policy: Policy, tap: Tap
    ) -> tuple[Array, Array]:
        nll_BS = tap("nll", library_nll(policy.read(x_BSD, "norm"), weight_VD, targets_BS, policy, loss))
        return weighted_mean(nll_BS, weights_BS, total), nll_BS

    return head
