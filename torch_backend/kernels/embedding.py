"""Embedding look-up with a deterministic gradient.

Inductor compiles the gradient of `F.embedding` to an atomic scatter-add. Where a token occurs twice, the order of that
sum, and with it the last bit, changes from run to run (observed on the CPU with torch 2.13). ATen's own kernels add in
a fixed order. Inside a custom operator, a compiled graph leaves them unchanged. A resume with equal bits depends on it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# For this many tokens or fewer, ATen uses another CUDA kernel, which has a race (pytorch#187687, #199569).
RACE = 3072


@torch.library.custom_op("lockstep::embedding_gradient", mutates_args=())
def embedding_gradient(grad_BSD: Tensor, tokens_BS: Tensor, rows: int) -> Tensor:
    """Sum the gradients (B, S, D) of all positions that have the same token (B, S) → (rows, D)."""
    if grad_BSD.is_cuda and tokens_BS.numel() <= RACE:
        # index_put_ sorts by token, as the kernel for more tokens does.
        zeros = grad_BSD.new_zeros((rows, grad_BSD.shape[-1]))
        return zeros.index_put_((tokens_BS,), grad_BSD, accumulate=True)
    return torch.ops.aten.embedding_dense_backward(grad_BSD.contiguous(), tokens_BS, rows, -1, False)


@embedding_gradient.register_fake
def _(grad_BSD: Tensor, tokens_BS: Tensor, rows: int) -> Tensor:
    return grad_BSD.new_empty((rows, grad_BSD.shape[-1]))


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_BS)
        ctx.rows = weight_VD.shape[0]
        return F.embedding(tokens_BS, weight_VD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (tokens_BS,) = ctx.saved_tensors
        return None, embedding_gradient(grads[0], tokens_BS, ctx.rows)


def embedding(tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
    """Return the rows of the table (V, D) for the tokens (B, S) → (B, S, D)."""
    rows: Tensor = _Embedding.apply(tokens_BS, weight_VD)
    return rows
