"""Devices that a run can be planned for: memory, bandwidth, links and peaks, with where each number is from.

Peaks are dense (core/model/budget.py): the datasheets' "1,979 TFLOPS" for bf16 on an H100 is with 2:4 sparsity, which
no pretraining uses.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.core.components.attention_kernels import ATTENTION_KERNELS
from lockstep.core.errors import UserError
from lockstep.core.model.budget import PEAK_FLOPS

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A kind of device.

    title: as the vendor calls it. memory: bytes that torch reports as the device's total; 0: not known. bandwidth: of
    its memory, bytes/s, read and written. link: to the other GPUs of its node, bytes/s in one direction. peaks: dense
    FLOP/s by operand. shares: what large products reach of the peak, by operand. attention: the same by kernel, over
    forward and backward pass. price: dollars an hour, an assumption. sources: of the numbers. in_a_step: how many times
    as long products and attention take in a whole step as they would at those shares, by operand and `attention`; what
    was not measured is not there. workspace: bytes that torch allocates for each handle of cuBLAS.
    """

    name: str
    title: str
    memory: float
    bandwidth: float
    link: float
    peaks: Mapping[str, float]
    shares: Mapping[str, float]
    attention: Mapping[str, float]
    price: float
    sources: tuple[str, ...]
    in_a_step: Mapping[str, float] = field(default_factory=dict)
    workspace: float = 0.0

    @property
    def cuda(self) -> bool:
        """Return whether it is a GPU, and not this machine's processor."""
        return self.name != "cpu"

    def rate(self, operand: str) -> float | None:
        """Return FLOP/s assumed for large products of this operand; None where the device has no such format."""
        peak = self.peaks.get(operand)
        if peak is None:
            return None
        return peak * self.shares.get(operand, self.shares["bf16"]) / self.in_a_step.get(operand, 1.0)

    def attention_rate(self, operand: str, kernel: str) -> float:
        """Return FLOP/s that attention is taken to reach with this kernel, over forward and backward pass."""
        share = self.attention.get(kernel, min(self.attention.values()))
        return self.peaks[operand] * share / self.in_a_step.get("attention", 1.0)


# The share of the dense peak that products reach: Maximum Achievable Matmul FLOPS, measured with torch 2.6 and 2.7
# (S. Bekman, Machine Learning Engineering, compute/accelerator): H100 SXM 794.5 of 989 in bf16 and 1402.6 of 1979 in
# FP8, A100 SXM 271.2 of 312, the A100 over PCIe 252.9. Products of FP32 and TF32 are taken to reach bf16's share.
_MAMF = "achievable products: S. Bekman, Machine Learning Engineering, MAMF table"
_HOPPER = {"bf16": 0.803, "fp16": 0.803, "fp8": 0.709}
_AMPERE = {"bf16": 0.869, "fp16": 0.869}
_A100 = {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12, "fp64": 19.5e12}
# In a whole step the GPU is at its limit of 700 W, and its clock falls by a tenth to a fifth. Measured on one H200 and
# one H100 (docs/results/h200.md, h100.md): the H200's products of bf16 and cuDNN's attention, kernel by kernel; FP8's
# products and their casts, but for what is read for scales, as what the H100's tensorwise step leaves for them.
_AT_700_W = {"bf16": 1.17, "fp16": 1.17, "fp8": 1.58, "attention": 1.8}
# torch/aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`: 32 MiB on Hopper, `:4096:2:16:8` before.
_WORKSPACE, _OLDER_WORKSPACE = 32.0 * 2**20, 1024.0 * (2 * 4096 + 8 * 16)
_H100, _PCIE = PEAK_FLOPS["NVIDIA H100 80GB HBM3"], PEAK_FLOPS["NVIDIA H100 PCIe"]


def _attention(architecture: str) -> dict[str, float]:
    kernels = ATTENTION_KERNELS.values()
    return {kernel.name: kernel.reaches[architecture] for kernel in kernels if architecture in kernel.reaches}


def _with_fp16(peaks: Mapping[str, float]) -> dict[str, float]:
    return {**peaks, "fp16": peaks["bf16"]}


# Prices: round numbers for on-demand GPUs of specialised clouds, 2025-26. They differ by a factor of three between
# sellers: an assumption, to be replaced by `--price`.
_KNOWN = (
    Gpu(
        "h100",
        "NVIDIA H100 SXM 80 GB",
        79.1 * GIB,
        3.35e12,
        450e9,
        _with_fp16(_H100),
        _HOPPER,
        _attention("hopper"),
        3.0,
        ("NVIDIA H100 datasheet: 80 GB, 3.35 TB/s, NVLink 900 GB/s both ways, 989 TFLOPS bf16 dense", _MAMF),
        _AT_700_W,
        _WORKSPACE,
    ),
    Gpu(
        "h100-pcie",
        "NVIDIA H100 PCIe 80 GB",
        79.1 * GIB,
        2.0e12,
        64e9,
        _with_fp16(_PCIE),
        _HOPPER,
        _attention("hopper"),
        2.5,
        ("NVIDIA H100 PCIe product brief: 80 GB, 2.0 TB/s, PCIe 5 128 GB/s both ways, 756 TFLOPS bf16 dense", _MAMF),
        workspace=_WORKSPACE,
    ),
    Gpu(
        "h200",
        "NVIDIA H200 SXM 141 GB",
        139.8 * GIB,
        4.8e12,
        450e9,
        _with_fp16(_H100),
        _HOPPER,
        _attention("hopper"),
        4.0,
        ("NVIDIA H200 datasheet: 141 GB, 4.8 TB/s, NVLink 900 GB/s both ways, products as the H100 SXM", _MAMF),
        _AT_700_W,
        _WORKSPACE,
    ),
    Gpu(
        "a100-80",
        "NVIDIA A100 SXM 80 GB",
        79.1 * GIB,
        2.039e12,
        300e9,
        _A100,
        _AMPERE,
        _attention("ampere"),
        1.8,
        ("NVIDIA A100 datasheet: 80 GB, 2,039 GB/s, NVLink 600 GB/s both ways, 312 TFLOPS bf16 dense", _MAMF),
        workspace=_OLDER_WORKSPACE,
    ),
    Gpu(
        "cpu",
        "this machine's processor",
        0.0,
        0.0,
        0.0,
        {},
        {"bf16": 1.0},
        {},
        0.0,
        ("memory only: no peak is assumed of a processor",),
    ),
)
GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _KNOWN}


def gpu_named(name: str) -> Gpu:
    """Return the device of this name. Raises UserError that lists the known ones."""
    found = GPUS.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), GPUS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"command line: gpu = {name or repr(name)}: not known; {hint}known are {', '.join(GPUS)}")
    return found
