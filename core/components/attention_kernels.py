"""Attention kernels: which there are, and what each can run.

The calls themselves stand in torch_backend/attention.py; the twin, jax_backend/attention.py, is written out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Mask = Literal["dense", "blocks"]

LOW = ("bf16", "fp16")
SINGLE = (*LOW, "fp32", "tf32")
EVERY = (*SINGLE, "fp64")
# Compute capability of Hopper.
HOPPER = (9, 0)
# Any head dimension: a multiple of 1, at least 1, at most any.
ANY_WIDTH = (1, 1, 1 << 30)


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel by name (`attention.kernel`).

    name:     of the setting; backends know it by this name.
    title:    in messages.
    of_call:  it is one of those that torch's scaled_dot_product_attention chooses from.
    written_out: it writes the scores (S, S) of every head out, with nothing rounded between its two products.
    operands: formats of q, k and v that it takes on CUDA; of a kernel of the CPU alone, there.
    widths:   head dimensions that it takes on CUDA: a multiple of the first, at least the second, at most the third.
    widest_on_hopper: the most from compute capability 9.0 on, where that is another one.
    bytes_at_a_time: head dimensions are a multiple of so many bytes, whatever `widths` allows; 0: of none.
    mask:     what keeps documents apart: a dense mask, or blocks of keys; None: it takes none on CUDA.
    mask_as_numbers: a dense mask is kept by every layer in the operand format.
    on_cpu:   why it does not run on the CPU; empty if it does.
    only_cpu: it runs on the CPU alone, with `operands` of an even width and without a mask.
    wide_sums: on the CPU it sums gradients in FP32; torch's flash kernel there sums them in the operand format.
    capability: the least compute capability. only_hopper: it is for 9.x alone.
    needs:    what must be there: `cudnn`, `triton` or `fa3` of torch_backend/attention.py, `Machine`; empty: nothing.
    rows:     FP32 statistics of a row that it keeps for the backward pass.
    kept:     `recompute.keep_products` keeps its output: it is an operator that recomputation knows by name.
    not_deterministic: why no run on CUDA with it gives the same bits twice, and what does; empty where one can.
    tried_on: kinds of device on which it may be the fastest: `lockstep bench best` tries it there.
    reaches:  share of the dense peak, forward and backward pass, by GPU architecture (core/plan/gpus.py).
    words:    its call in the table at start, where it differs from `title`.
    """

    name: str
    title: str = ""
    of_call: bool = True
    written_out: bool = False
    operands: tuple[str, ...] = LOW
    widths: tuple[int, int, int] = ANY_WIDTH
    widest_on_hopper: int = 0
    bytes_at_a_time: int = 0
    mask: Mask | None = "dense"
    mask_as_numbers: bool = True
    on_cpu: str = "runs on CUDA alone, and this run is on the CPU"
    only_cpu: bool = False
    wide_sums: bool = False
    capability: tuple[int, int] = (0, 0)
    only_hopper: bool = False
    needs: Literal["", "cudnn", "triton", "fa3"] = ""
    rows: int = 1
    kept: bool = True
    not_deterministic: str = ""
    tried_on: tuple[str, ...] = ()
    reaches: Mapping[str, float] = field(default_factory=dict)
    words: str = ""


# A kernel that is chosen later: on the CPU by core/config/auto.py, on CUDA by torch's own call.
AUTO = AttentionKernel("auto", "torch's own choice", operands=EVERY, on_cpu="")

# `reaches`: FlashAttention-2 reaches 35 % of an H100, FlashAttention-3 up to 75 % forward at long sequences (Shah et
# al. 2024, arXiv 2407.08608); over forward and backward pass at 2048 tokens, causal, its figures 5 and 6 are near half.
# FlashAttention-2 reaches 50 to 73 % of an A100 (Dao 2023, arXiv 2307.08691). cuDNN's is of their kind; the others are
# taken as FlashAttention-2 or below. Written out, it is products at their own share over all S positions, twice what
# causal attention counts; its traffic is counted as memory.
#
# Those of torch's call stand in the order in which it would take them.
ATTENTION_KERNELS: dict[str, AttentionKernel] = {
    kernel.name: kernel
    for kernel in (
        AUTO,
        AttentionKernel(
            "cudnn",
            "cuDNN's attention",
            widths=(8, 8, 128),
            widest_on_hopper=256,
            capability=(8, 0),
            needs="cudnn",
            # aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: torch prints so and leaves it out.
            not_deterministic="its backward pass is not deterministic; take flash, efficient, math or auto",
            tried_on=("cuda",),
            reaches={"hopper": 0.5, "ampere": 0.55},
        ),
        AttentionKernel(
            "flash",
            "flash attention",
            widths=(8, 8, 256),
            mask=None,
            on_cpu="",
            capability=(8, 0),
            tried_on=("cpu", "cuda"),
            reaches={"hopper": 0.35, "ampere": 0.55},
        ),
        AttentionKernel(
            "efficient",
            "memory-efficient attention",
            operands=SINGLE,
            bytes_at_a_time=16,
            tried_on=("cuda",),
            reaches={"hopper": 0.25, "ampere": 0.4},
        ),
        AttentionKernel(
            "math",
            "written-out attention",
            written_out=True,
            operands=EVERY,
            on_cpu="",
            tried_on=("cpu",),
            reaches={"hopper": 0.4, "ampere": 0.43},
        ),
        AttentionKernel(
            "flash_brgemm",
            "flash attention by oneDNN's block product",
            of_call=False,
            operands=("bf16", "fp32", "tf32"),
            widths=(2, 2, 1 << 30),
            mask=None,
            mask_as_numbers=False,
            on_cpu="",
            only_cpu=True,
            wide_sums=True,
            tried_on=("cpu",),
            words="flash attention by oneDNN's block product",
        ),
        AttentionKernel(
            "fa3",
            "FlashAttention-3",
            of_call=False,
            widths=(8, 8, 256),
            mask=None,
            mask_as_numbers=False,
            only_hopper=True,
            needs="fa3",
            kept=False,
            # Dao-AILab/flash-attention#1596, #1766, #2244.
            not_deterministic="builds of FlashAttention-3 have dropped its deterministic option without a word, and "
            "none tells which it is; take flash",
            tried_on=("cuda",),
            reaches={"hopper": 0.5},
            words="flash_attn_interface (FlashAttention-3)",
        ),
        AttentionKernel(
            "flex",
            "FlexAttention",
            of_call=False,
            operands=SINGLE,
            widths=(1, 16, 256),
            mask="blocks",
            mask_as_numbers=False,
            on_cpu="has no backward pass on the CPU",
            needs="triton",
            rows=2,
            kept=False,
            reaches={"hopper": 0.35, "ampere": 0.45},
            words="flex_attention",
        ),
    )
}


def taken_on_cuda(operand: str) -> AttentionKernel:
    """Return the kernel that `auto` takes on CUDA: the first of torch's call that accepts operands of this format."""
    of_call = (kernel for kernel in ATTENTION_KERNELS.values() if kernel.of_call and kernel is not AUTO)
    return next(kernel for kernel in of_call if operand in kernel.operands)
