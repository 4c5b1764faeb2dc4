"""The casts of other libraries' loss heads: final norm's output → per-token NLL, without logits to show.

Twin: torch_backend/kernels/library_heads.py, which describes what it hands to a library and what comes back. The
libraries compute cross-entropy in the stream dtype, FP32, where Lockstep's own head does so in FP64.

torch  (torch/nn/modules/linear_cross_entropy.py, 2.13): FP32 logits; NLL rounded to the operand dtype; the weight's
       gradient summed in FP32 within a chunk and in the operand dtype from chunk to chunk. On CUDA softmax and the
       target's share are rounded apart, before their difference is taken.
liger  (Hsu et al. 2024, arXiv 2410.10989): logits rounded; their gradient is, too; the weight's summed in FP32.
cce    (Wijmans et al. 2025, arXiv 2411.09009): FP32 logits; their gradient is rounded; the weight's is rounded once
       here, and in the library as often as blocks of tokens add to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from lockstep.core.config.schema import LossConfig
from lockstep.jax_backend.policy import Policy


def _of_torch(policy: Policy, softmax: Array, is_target: Array, share: Array) -> Array:
    if policy.kernel == "cuda":
        return policy.round(softmax * share) - policy.round(is_target * share)
    return (softmax - is_target) * share


def _of_liger(policy: Policy, softmax: Array, is_target: Array, share: Array) -> Array:
    return policy.round(policy.round(softmax - is_target) * share)


def _of_cce(policy: Policy, softmax: Array, is_target: Array, share: Array) -> Array:
    return policy.round((softmax - is_target) * share)


@dataclass(frozen=True)
class Casts:
    """A library's roundings to the operand format, beside the operands and the returned gradients.

    gradient:  (policy, softmax (B, S, V), one-hot targets (B, S, V), gradient of each loss (B, S, 1)) → gradient of the
               logits (B, S, V), with its roundings.
    logits:    the logits. nll: the losses. share: the gradient of each loss.
    by_chunks: the weight's gradient from one chunk of tokens to the next.
    """

    gradient: Callable[[Policy, Array, Array, Array], Array]
    logits: bool = False
    nll: bool = False
    share: bool = True
    by_chunks: bool = False


# Library heads by their name in core/components/loss_heads.py.
CASTS: dict[str, Casts] = {
    "torch": Casts(_of_torch, nll=True, by_chunks=True),
    "liger": Casts(_of_liger, logits=True),
    "cce": Casts(_of_cce, share=False),
}


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def library_nll(x_BSD: Array, weight_VD: Array, targets_BS: Array, policy: Policy, loss: LossConfig) -> Array:
    """Return logsumexp(logits) − the target's logit, (B, S) in nats, stream dtype, with the library's roundings."""
    return _forward(x_BSD, weight_VD, targets_BS, policy, loss)[0]


def _forward(
    x_BSD: Array, weight_VD: Array, targets_BS: Array, policy: Policy, loss: LossConfig
) -> tuple[Array, tuple[Array, ...]]:
    x, weight = policy.round(x_BSD), policy.round(weight_VD)
    logits = jnp.einsum("...d,vd->...v", x, weight)
    casts = CASTS[loss.head]
    logits = policy.round(logits) if casts.logits else logits
    shifted = logits - logits.max(-1, keepdims=True)
    logsumexp = jnp.log(jnp.exp(shifted).sum(-1))
    nll = logsumexp - jnp.take_along_axis(shifted, targets_BS[..., None], -1)[..., 0]
    if loss.z_loss:
        nll += loss.z_loss * jnp.square(logsumexp + logits.max(-1))
    return policy.round(nll) if casts.nll else nll, (x, weight, targets_BS, shifted, logsumexp, logits)


def _backward(policy: Policy, loss: LossConfig, saved: tuple[Array, ...], grad_BS: Array) -> tuple[Array, Array, None]:
    x, weight, targets, shifted, logsumexp, logits = saved
    # The library gets gradients whose largest is 1, in which weights of 1 and 0 are exact, and is scaled afterwards.
    largest = jnp.abs(grad_BS).max()
    largest = jnp.where(largest > 0, largest, 1)
    grad = grad_BS / largest
    casts = CASTS[loss.head]
    share = policy.round(grad)[..., None] if casts.share else grad[..., None]
    softmax = jnp.exp(shifted - logsumexp[..., None])
    if loss.z_loss:
        softmax *= (1 + 2 * loss.z_loss * (logsumexp + logits.max(-1)))[..., None]
    is_target = jax.nn.one_hot(targets, weight.shape[0], dtype=x.dtype)
    of_logits = casts.gradient(policy, softmax, is_target, share)
    grad_x = policy.round(of_logits @ weight)
    rows, of_rows = of_logits.reshape(-1, len(weight)), x.reshape(-1, x.shape[-1])
    if casts.by_chunks and policy.operand is not None:
        grad_weight = _by_chunks(rows, of_rows, loss.chunk, policy)
    else:
        grad_weight = policy.round(rows.T @ of_rows)
    return grad_x * largest, grad_weight * largest, None


def _by_chunks(rows: Array, of_rows: Array, chunk: int, policy: Policy) -> Array:
    """Return Σ over chunks of rowsᵀ·of_rows, each sum of two rounded to the operand dtype."""
    count = -(-len(rows) // chunk)
    short = ((0, count * chunk - len(rows)), (0, 0)) if count > 1 else ((0, 0), (0, 0))
    parts = tuple(jnp.pad(a, short).reshape(count, -1, a.shape[-1]) for a in (rows, of_rows))

    def add(total: Array, part: tuple[Array, ...]) -> tuple[Array, None]:
        return policy.round(total + part[0].T @ part[1]), None

    total, _ = lax.scan(add, jnp.zeros((rows.shape[-1], of_rows.shape[-1]), rows.dtype), parts)
    return total


library_nll.defvjp(_forward, _backward)
