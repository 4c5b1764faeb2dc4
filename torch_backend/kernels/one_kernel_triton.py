"""Triton kernels of the `one_kernel` loss head. torch_backend/kernels/one_kernel.py imports this file at a launch.

One program computes one row. There are two kernels:

    one_kernel_held    a cluster of thread blocks keeps the row in its registers: the logits are read from memory once
    one_kernel_again   one thread block reads the row twice: first for maximum and sum, then for the gradient

Precision: a difference x − max is exact to FP64, an exponential to about one ulp of FP32. The sum over the vocabulary
and all later operations are FP64. Loss and gradient are each rounded once more, to their own format.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Below this, e^x is not a normal number of FP32, and does not change a sum that is 1 or more.
LEAST = tl.constexpr(-87.0)
# Initial value of a maximum: finite, because −inf − (−inf) is NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def exponential(x):  # type: ignore[no-untyped-def]
    """Return e^x in FP32 for x ≤ 0 in FP64; 0 below LEAST, NaN for NaN.

    The result is 2^n times the Taylor series of e^r, |r| ≤ ln 2 / 2. The first omitted term, r^8 / 8!, is 5e-9.
    """
    gone = x < LEAST
    x = tl.where(gone, 0.0, x)
    n = tl.floor(x.to(tl.float32) * LOG2_E + 0.5)
    r = (x - n.to(tl.float64) * LN_2).to(tl.float32)
    series = 1.0 + r * (1 / 7)
    series = 1.0 + r * (1 / 6) * series
    series = 1.0 + r * (1 / 5) * series
    series = 1.0 + r * (1 / 4) * series
    series = 1.0 + r * (1 / 3) * series
    series = 1.0 + r * (1 / 2) * series
    series = 1.0 + r * series
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(gone, 0.0, series * power)


@triton.jit
def loss_of(largest, total, chosen, Z_LOSS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a row's loss, and the factor of its exponentials in the gradient; FP64. chosen: the target's logit."""
    logsumexp = largest + tl.log(total)
    return logsumexp - chosen + Z_LOSS * logsumexp * logsumexp, (1.0 + 2.0 * Z_LOSS * logsumexp) / total


@triton.jit
def gradient(exponentials, factor, is_target, share):  # type: ignore[no-untyped-def]
    """Return (softmax · (1 + 2 · z_loss · logsumexp) − onehot(target)) · share, in FP32."""
    return ((exponentials.to(tl.float64) * factor - tl.where(is_target, 1.0, 0.0)) * share).to(tl.float32)


@triton.jit
def one_kernel_held(  # type: ignore[no-untyped-def]
    logits_ptr,  # (N, V), rows `logits_stride` apart: FP32 or a narrower format
    grad_ptr,  # (N, V), rows `grad_stride` apart: may be the logits' memory, in a format that is not wider
    targets_ptr,  # (N,) int64
    shares_ptr,  # (N,): the gradient of each loss
    losses_ptr,  # (N,)
    logits_stride,
    grad_stride,
    VOCABULARY: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least V
):
    """Write a row's loss and the gradient of its logits."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    logits = logits_ptr + row * logits_stride
    target = tl.load(targets_ptr + row)
    chosen = tl.load(logits + target).to(tl.float64)
    share = tl.load(shares_ptr + row).to(tl.float64)

    x = tl.load(logits + at, mask=at < VOCABULARY, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, 0).to(tl.float64)
    exponentials = exponential(x.to(tl.float64) - largest)
    total = tl.sum(exponentials.to(tl.float64), 0)
    loss, factor = loss_of(largest, total, chosen, Z_LOSS)
    tl.store(losses_ptr + row, loss)
    # Both reductions have read the whole row, so the gradient may overwrite it.
    grad = gradient(exponentials, factor, at == target, share)
    tl.store(grad_ptr + row * grad_stride + at, grad.to(grad_ptr.dtype.element_ty), mask=at < VOCABULARY)


@triton.jit
def one_kernel_again(  # type: ignore[no-untyped-def]
    logits_ptr,
    grad_ptr,
    targets_ptr,
    shares_ptr,
    losses_ptr,
    logits_stride,
    grad_stride,
    VOCABULARY: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two
):
    """Write the same results, reading the row twice, BLOCK columns at a time. Arguments as in `one_kernel_held`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    logits, grads = logits_ptr + row * logits_stride, grad_ptr + row * grad_stride
    target = tl.load(targets_ptr + row)
    chosen = tl.load(logits + target).to(tl.float64)
    share = tl.load(shares_ptr + row).to(tl.float64)

    largest, total = tl.full((), LOWEST, tl.float64), tl.full((), 0.0, tl.float64)
    for start in range(0, VOCABULARY, BLOCK):
        at = start + columns
        x = tl.load(logits + at, mask=at < VOCABULARY, other=float("-inf")).to(tl.float32)
        before, largest = largest, tl.maximum(largest, tl.max(x, 0).to(tl.float64))
        part = tl.sum(exponential(x.to(tl.float64) - largest).to(tl.float64), 0)
        total = total * tl.exp(before - largest) + part
    loss, factor = loss_of(largest, total, chosen, Z_LOSS)
    tl.store(losses_ptr + row, loss)
    for start in range(0, VOCABULARY, BLOCK):
        at = start + columns
        x = tl.load(logits + at, mask=at < VOCABULARY, other=float("-inf")).to(tl.float32)
        grad = gradient(exponential(x.to(tl.float64) - largest), factor, at == target, share)
        # A gradient in a format of half the width lies before the logits of its columns or among those of this block:
        # all threads must have read the block before any of them writes.
        tl.debug_barrier()
        tl.store(grads + at, grad.to(grad_ptr.dtype.element_ty), mask=at < VOCABULARY)
