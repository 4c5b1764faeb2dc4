"""The loss head `one_kernel`: one Triton kernel per chunk computes losses, and writes the logits' gradient over them.

The kernels are in one_kernel_triton.py, which imports Triton; this file imports it only to launch a kernel. Their
arithmetic is that of torch_backend/loss.py, but with FP32 exponentials instead of FP64 ones, so the twin is the same.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from importlib.util import find_spec

import torch
from torch import Tensor

# Columns that a thread block keeps in its registers, and the largest cluster size, in thread blocks, that every GPU
# with clusters supports (CUDA C++ programming guide, "Thread block clusters").
HELD, CLUSTER = 2**14, 8
HELD_WARPS = 16
# Columns that a thread block processes at a time if it reads a row twice.
AT_A_TIME, AT_A_TIME_WARPS = 2**12, 8
# The first version of Triton that can reduce over the thread blocks of a cluster; 3.7 fails an assertion.
OVER_CLUSTERS = (3, 8)
HOPPER = (9, 0)


def missing(device: torch.device) -> str | None:
    """Return the reason why the kernels cannot run on a device, to be printed after the head's name; else None."""
    if find_spec("triton") is None:
        return "needs Triton; take 'chunked'"
    # Triton's interpreter runs the kernels on the CPU. It is slow, but sufficient for tests of their results.
    if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        return "is made of Triton kernels and needs CUDA; take 'chunked'"
    return None


def readings(vocabulary: int, device: torch.device) -> int:
    """Return how often the kernel reads the logits: once if a row fits a cluster's registers, else twice."""
    return 1 if vocabulary <= HELD * _largest_cluster(device) else 2


def losses_and_gradient(
    logits_NV: Tensor, targets_N: Tensor, shares_N: Tensor, z_loss: float, operand: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return losses (N,) in FP32, and the gradient of the logits (N, V) in the operand dtype.

    logits: contiguous, FP32 or the operand dtype. The gradient overwrites them, and its rows keep their distance in
    bytes. shares: the gradient of each loss, FP32 (N,).
    """
    losses_N = _in_place(logits_NV, targets_N, shares_N, z_loss, operand)
    return losses_N, logits_NV.view(operand)[:, : logits_NV.shape[1]]


# A compiler cannot see inside a custom operator, and does not change the kernels.
@torch.library.custom_op("lockstep::one_kernel_in_place", mutates_args=("logits",))
def _in_place(logits: Tensor, targets: Tensor, shares: Tensor, z_loss: float, operand: torch.dtype) -> Tensor:
    losses = torch.empty_like(shares)
    _launch(logits, logits.view(operand), targets, shares, losses, z_loss)
    return losses


@torch.library.custom_op("lockstep::one_kernel", mutates_args=())
def losses_and_shown_gradient(logits: Tensor, targets: Tensor, shares: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return losses (N,) and the gradient (N, V) in new memory and in the logits' dtype, for taps of both."""
    losses, grad = torch.empty_like(shares), torch.empty_like(logits)
    _launch(logits, grad, targets, shares, losses, z_loss)
    return losses, grad


@_in_place.register_fake
def _(logits: Tensor, targets: Tensor, shares: Tensor, z_loss: float, operand: torch.dtype) -> Tensor:
    return torch.empty_like(shares)


@losses_and_shown_gradient.register_fake
def _(logits: Tensor, targets: Tensor, shares: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(shares), torch.empty_like(logits)


def _launch(logits: Tensor, grad: Tensor, targets: Tensor, shares: Tensor, losses: Tensor, z_loss: float) -> None:
    from lockstep.torch_backend.kernels import one_kernel_triton as kernels

    rows, vocabulary = logits.shape
    arguments = logits, grad, targets, shares, losses, logits.stride(0), grad.stride(0), vocabulary, z_loss
    if readings(vocabulary, logits.device) == 1:
        # Triton requires a power of two.
        block = 1 << (vocabulary - 1).bit_length()
        kernels.one_kernel_held[(rows,)](*arguments, block, num_warps=HELD_WARPS, num_ctas=max(1, block // HELD))
    else:
        kernels.one_kernel_again[(rows,)](*arguments, AT_A_TIME, num_warps=AT_A_TIME_WARPS)


def _largest_cluster(device: torch.device) -> int:
    """Return how many thread blocks may share a row: 1 before Hopper, and with a Triton without such reductions."""
    knows = tuple(map(int, version("triton").split(".")[:2])) >= OVER_CLUSTERS
    return CLUSTER if knows and device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER else 1
