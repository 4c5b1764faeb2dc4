"""Causal attention written out, with the roundings of torch's CPU flash kernel under bf16.

torch (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp) computes scores in FP32, rounds the *unnormalised* exp(score
− max) to bf16 before the product with V, sums the unrounded values, divides, and rounds the output. Its backward
(FlashAttention-2, Dao 2023, algorithm 2) recomputes P = exp(score − logsumexp), rounds P and dS to bf16 before their
products, and takes Δ = Σ dO ⊙ O in FP32 from the rounded O. It processes blocks of queries and of keys, and adds each
block's part to gradients that are *stored in bf16*: over 16 blocks of 64 queries that alone makes the errors of the
gradients of k and v 1.9 times as large. CUDA kernels accumulate in FP32, and so does Lockstep's on the CPU
(torch_backend/kernels/block_attention.py).

Under a document mask torch's CPU call runs the same kernel; masked positions add zeros. Its `math` kernel
computes in FP32 from bf16 operands and rounds its results, forward and backward; where it handles grouped
queries, it sums the gradients of a group before it rounds them. The flash kernel then adds those of a group's queries
one head after another, in bf16.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from types import EllipsisType

import jax
import jax.numpy as jnp
from jax import Array

from lockstep.jax_backend.policy import Policy

Mask = Array  # (B, 1, S, S) bool
Saved = tuple[Array, Array, Array, Array, Array, Array | None]


@dataclass(frozen=True)
class Blocks:
    """Block sizes of a kernel's backward pass, in queries and keys; parts are added in the operand dtype."""

    queries: int
    keys: int


def cpu_blocks(length: int) -> Blocks:
    """Return block sizes of torch's CPU kernel at a sequence length (`flash_attention_backward_kernel_impl`)."""
    return Blocks(256 if length >= 768 else 64 if length >= 192 else 32, 512)


@dataclass(frozen=True)
class Scores:
    """The form of attention's scores.

    scale: of q·kᵀ. cap: scores become cap·tanh(score / cap); 0: they do not.
    """

    scale: float
    cap: float = 0.0


def document_mask(documents_BS: Array) -> Array:
    """Return (B, 1, S, S) bool: the keys that a query sees, those of its own document that do not come after it."""
    position = jnp.arange(documents_BS.shape[1])
    same_BST = documents_BS[:, :, None] == documents_BS[:, None, :]
    return (same_BST & (position[:, None] >= position[None, :]))[:, None]


def window_mask(documents_BS: Array | None, window: int, length: int) -> Array:
    """Return (B or 1, 1, S, S) bool: itself and the keys of a query's document less than `window` before it."""
    position = jnp.arange(length)
    ago_ST = position[:, None] - position[None, :]
    near = jnp.logical_and(ago_ST >= 0, ago_ST < window)[None, None]
    return near if documents_BS is None else near & document_mask(documents_BS)


def attention(
    q_BSHE: Array,
    k_BSHE: Array,
    v_BSHE: Array,
    policy: Policy,
    mask_B1ST: Array | None = None,
    scores: Scores | None = None,
) -> Array:
    """Return softmax(q·kᵀ·scale + mask)·v, (B, S, H, E); without a mask, a query sees the keys up to its own place.

    k and v have as many heads as q, or fewer, each for the queries of a group. scores: by default 1/√E is the scale.
    """
    return _attention(q_BSHE, k_BSHE, v_BSHE, policy, mask_B1ST, scores or Scores(1.0 / math.sqrt(q_BSHE.shape[-1])))


@partial(jax.custom_vjp, nondiff_argnums=(3, 5))
def _attention(
    q_BSHE: Array, k_BSHE: Array, v_BSHE: Array, policy: Policy, mask_B1ST: Array | None, of: Scores
) -> Array:
    return _forward(q_BSHE, k_BSHE, v_BSHE, policy, mask_B1ST, of)[0]


def _scores(q_BSHE: Array, k_BSHE: Array, mask_B1ST: Array | None, of: Scores) -> Array:
    length = q_BSHE.shape[1]
    scores_BHST = jnp.einsum("bshe,bthe->bhst", q_BSHE, k_BSHE) * of.scale
    if of.cap:
        scores_BHST = of.cap * jnp.tanh(scores_BHST / of.cap)
    causal_ST = jnp.arange(length)[:, None] >= jnp.arange(length)[None, :]
    return jnp.where(causal_ST if mask_B1ST is None else mask_B1ST, scores_BHST, -jnp.inf)


def _inner(policy: Policy, x: Array) -> Array:
    """Round an intermediate as a fused kernel does between its two products; the kernel `math` does not round it."""
    return x if policy.kernel == "math" else policy.round(x)


def _forward(
    q_BSHE: Array, k_BSHE: Array, v_BSHE: Array, policy: Policy, mask_B1ST: Array | None, of: Scores
) -> tuple[Array, Saved]:
    q, k, v = policy.round(q_BSHE), policy.round(k_BSHE), policy.round(v_BSHE)
    group = q.shape[2] // k.shape[2]
    if group > 1:
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = _scores(q, k, mask_B1ST, of)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    out = jnp.einsum("bhst,bthe->bshe", _inner(policy, weights), v) / jnp.moveaxis(total, 1, 2)
    rounded = policy.round_output(out)
    # Δ is taken from the rounded output. `math` does not use Δ and sums over its weights instead.
    kept = out if policy.kernel == "math" else rounded
    return rounded, (q, k[:, :, ::group], v[:, :, ::group], kept, top + jnp.log(total), mask_B1ST)


def _backward(policy: Policy, of: Scores, saved: Saved, grad_BSHE: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, out, logsumexp, mask_B1ST = saved
    grad = policy.round(grad_BSHE)
    group = q.shape[2] // k.shape[2]
    if group > 1:
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    length = q.shape[1]
    blocks = cpu_blocks(length) if policy.kernel == "cpu" else Blocks(length, length)
    scores = _scores(q, k, mask_B1ST, of)
    weights = jnp.exp(scores - logsumexp)
    delta = jnp.einsum("bshe,bshe->bhs", grad, out)[..., None]
    grad_scores = weights * (jnp.einsum("bshe,bthe->bhst", grad, v) - delta)
    if of.cap:
        # tanh′ = 1 − tanh²; where a key is not seen its weight is 0.
        grad_scores *= 1.0 - jnp.square(jnp.where(jnp.isneginf(scores), 0.0, scores) / of.cap)
    grad_scores = _inner(policy, grad_scores)
    weights = _inner(policy, weights)
    grad_q = jnp.zeros_like(q)
    grad_k = grad_v = _of_groups(jnp.zeros_like(k), group, ...)
    for part in _slices(length, blocks.keys):
        grad_q = policy.round(grad_q + jnp.einsum("bhst,bthe->bshe", grad_scores[..., part], k[:, part]) * of.scale)
    members = range(group) if one_by_one(policy) else [...]
    for member, part in itertools.product(members, _slices(length, blocks.queries)):
        of_k = jnp.einsum("bhst,bshe->bthe", grad_scores[:, :, part], q[:, part]) * of.scale
        of_v = jnp.einsum("bhst,bshe->bthe", weights[:, :, part], grad[:, part])
        grad_k = policy.round(grad_k + _of_groups(of_k, group, member))
        grad_v = policy.round(grad_v + _of_groups(of_v, group, member))
    return grad_q, grad_k, grad_v, None


def one_by_one(policy: Policy) -> bool:
    """Return whether the gradients of a group's queries are added one head after another, and not summed at once."""
    return policy.kernel == "cpu"


def _of_groups(x_BTHE: Array, group: int, member: int | EllipsisType) -> Array:
    """Return (B, T, H/group, E) of x (B, T, H, E): one member of each group, or the sum over all of them (`...`)."""
    if group == 1:
        return x_BTHE
    by_group = x_BTHE.reshape(*x_BTHE.shape[:2], -1, group, x_BTHE.shape[-1])
    return by_group.sum(3) if member is ... else by_group[:, :, :, member]


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]


_attention.defvjp(_forward, _backward)
