"""The loss of a batch in chunks of tokens, without the whole matrix of logits (tokens, V).

The forward pass computes the gradients. For each chunk it computes the logits, the losses, the gradient of the logits,
and from it the gradients of the hidden states and of the head's weight. The weight's gradient is summed over chunks in
the stream dtype. The backward pass only scales these gradients. No product is computed twice, and the memory is that of
one chunk, as in Liger's fused cross-entropy (Hsu et al. 2024, arXiv 2410.10989).

The twin has no chunks (jax_backend/model.py): chunks change only the order of one sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.core.model.families.transformer import UNCAPPED
from lockstep.torch_backend.kernels import one_kernel
from lockstep.torch_backend.loss import losses_and_gradient
from lockstep.torch_backend.precision import Policy, add_product, narrow_product, wide_product


@torch.library.custom_op("lockstep::after", mutates_args=(), schema="(Tensor x, Tensor[] done) -> Tensor")
def _after(x: Tensor, done: Sequence[Tensor]) -> Tensor:
    return x.clone()


@_after.register_fake
def _(x: Tensor, done: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(x)


def after(x: Tensor, done: Sequence[Tensor]) -> Tensor:
    """Return x; a compiled program computes all of `done` before any operation that reads the returned tensor.

    A compiler orders operations by their inputs alone, so it may compute the logits of all chunks before it uses any of
    them. It cannot see inside a custom operation, and must compute all its arguments first. An eager program needs no
    such operation: it runs in the order of the code.
    """
    return _after(x, done) if torch.compiler.is_compiling() else x


class _ChunkedLoss(torch.autograd.Function):
    """(x (N, D), weight (V, D), targets (N,), weights (N,), total) → loss, losses (N,), and the tensors of the taps."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        weights_N: Tensor,
        total: Tensor,
        settings: tuple[torch.dtype, float, int, bool, str, bool, bool, float],
    ) -> tuple[Tensor, ...]:
        operand, z_loss, chunk, show, library, narrow_logits, by_one_kernel, cap = settings
        stream = weight_VD.dtype
        in_place = by_one_kernel or library == "brgemm"
        x, weight = x_ND.to(operand), weight_VD.to(operand)
        shares_N = weights_N.double() / total.double()
        loss = torch.zeros((), dtype=torch.float64, device=x.device)
        grad_weight = torch.zeros_like(weight_VD)
        losses: list[Tensor] = []
        grad_x: list[Tensor] = []
        shown: list[tuple[Tensor, ...]] = []
        for start in range(0, len(x), chunk):
            rows = slice(start, start + chunk)
            # Begin after all results of the previous chunk, so that the logits of two chunks never exist together.
            x_rows = after(x[rows], [loss, losses[-1], grad_x[-1], grad_weight]) if losses else x[rows]
            if narrow_logits:
                logits = narrow_product(x_rows, weight.T, stream, library).to(operand)
            else:
                logits = wide_product(x_rows, weight.T, stream, library)
            capped = cap * torch.tanh(logits / cap) if cap else logits
            # The share is rounded to the stream dtype, as autograd rounds the gradient of a loss.
            of_chunk = capped, targets_N[rows], shares_N[rows].to(stream), z_loss
            if not by_one_kernel:
                part, of_capped = losses_and_gradient(*of_chunk, overwrite=not (show or cap))
                # tanh′ = 1 − tanh².
                grad = of_capped * (1 - (capped / cap).square()) if cap else of_capped
            elif show:
                part, grad = one_kernel.losses_and_shown_gradient(*of_chunk)
            else:
                part, grad = one_kernel.losses_and_gradient(*of_chunk, operand)
            narrow = grad.to(operand)
            grad_x.append(narrow_product(narrow, weight, stream, library))
            if in_place:
                add_product(grad_weight, narrow.T, x_rows, library)
            else:
                grad_weight += wide_product(narrow.T, x_rows, stream, library)
            loss = loss + (part.double() * weights_N[rows].double()).sum()
            losses.append(part)
            if show:
                shown.append((logits, capped, grad, of_capped) if cap else (logits, grad))
        if narrow_logits:
            grad_weight = grad_weight.to(operand).to(stream)
        ctx.of_x = x_ND.dtype
        ctx.save_for_backward(torch.cat(grad_x), grad_weight)
        ctx.set_materialize_grads(False)
        found = (torch.cat(losses), *(torch.cat(parts) for parts in zip(*shown, strict=True)))
        ctx.mark_non_differentiable(*found)
        return loss / total.double(), *found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        scale = grads[0].to(grad_x.dtype)
        return (grad_x * scale).to(ctx.of_x), grad_weight * scale, None, None, None, None


class _Link(torch.autograd.Function):
    """The identity on the loss; its backward pass gives the tapped logits and losses their gradients.

    shown: the tapped tensors, and then the gradient of each.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *shown: Tensor) -> Tensor:
        ctx.save_for_backward(*shown[len(shown) // 2 :])
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own = ctx.saved_tensors
        scale = grads[0].to(own[-1].dtype)
        return grads[0], *((grad * scale).to(grad.dtype) for grad in own), *(None for _ in own)


def chunked_loss(
    x_BSD: Tensor,
    weight_VD: Tensor,
    targets_BS: Tensor,
    weights_BS: Tensor,
    total: Tensor,
    policy: Policy,
    z_loss: float,
    chunk: int,
    tap: Callable[[str, Tensor], Tensor] | None,
    by_one_kernel: bool = False,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return Σ weight·loss / total, a float64 scalar, and the per-token losses (B, S), which carry no gradient.

    Args:
        x_BSD: final-norm output (B, S, D).
        weight_VD: the head's weight (V, D).
        targets_BS: target tokens (B, S).
        weights_BS: loss weights (B, S).
        total: sum of the loss weights of the step.
        policy: precision policy of the products.
        z_loss: coefficient of the z-loss.
        chunk: tokens of a chunk.
        tap: receives the logits before their cap, if any, `logits` and `nll`, with their gradients; None keeps none.
        by_one_kernel: one Triton kernel per chunk computes losses and gradient (torch_backend/kernels/one_kernel.py),
            and the products add to the weight's gradient in place.
        cap: cap of the logits; 0 is none. Not supported by one kernel.
    """
    narrow, batch = policy.casts.rounds("logits"), targets_BS.shape
    settings = policy.operand, z_loss, chunk, tap is not None, policy.library, narrow, by_one_kernel, cap
    arguments = x_BSD.flatten(0, 1), weight_VD, targets_BS.flatten(), weights_BS.flatten(), total, settings
    loss, losses_N, *shown = _ChunkedLoss.apply(*arguments)
    losses_BS = losses_N.unflatten(0, batch)
    if tap is not None:
        tensors = [tensor.unflatten(0, batch) for tensor in shown]
        names = (UNCAPPED, "logits") if cap else ("logits",)
        seen = [tap(name, tensor) for name, tensor in zip(names, tensors, strict=False)]
        shares_BS = (weights_BS.double() / total.double()).to(losses_BS.dtype)
        losses_BS = tap("nll", losses_BS)
        loss = _Link.apply(loss, *seen, losses_BS, *tensors[len(names) :], shares_BS)
    return loss, losses_BS
