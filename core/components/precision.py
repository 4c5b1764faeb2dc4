"""Precision policies: which number formats a run's tensors and matrix products have.

The casts themselves stand in torch_backend/precision.py and jax_backend/precision.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Recipe = Literal["tensorwise", "rowwise", "delayed"]


@dataclass(frozen=True)
class Format:
    """A floating-point format.

    bytes: of a stored number. roundoff: half the distance from 1 to the next number. as_read: CUDA's tensor cores read
    so much of stored FP32 numbers; the CPU has no such format. by_fp32: the CPU computes its products in FP32 and
    rounds them, always or where it has no fast instructions for bf16 (core/config/auto.py, `multiplies_bf16`).
    by_blocks: oneDNN's block product multiplies it on the CPU, with FP32 results (`precision.cpu_products`).
    """

    name: str
    bytes: int
    roundoff: float
    as_read: bool = False
    by_fp32: Literal["never", "always", "without bf16 instructions"] = "never"
    by_blocks: bool = False


FORMATS: dict[str, Format] = {
    found.name: found
    for found in (
        Format("fp64", 8, 2.0**-53),
        Format("fp32", 4, 2.0**-24, by_blocks=True),
        # The tensor cores read 10 of its fraction's bits.
        Format("tf32", 4, 2.0**-11, as_read=True, by_blocks=True),
        Format("bf16", 2, 2.0**-8, by_fp32="without bf16 instructions", by_blocks=True),
        Format("fp16", 2, 2.0**-11, by_fp32="always"),
        Format("fp8", 1, 2.0**-4),
    )
}


@dataclass(frozen=True)
class PrecisionPolicy:
    """A policy by name (`precision.policy`).

    operand: format of both operands of a matrix product outside FP8. stream: format of everything else: master weights,
    residual stream, norms, softmax, loss. fp8: which numbers of a block's linear layer share a scale, all of a tensor,
    those of a row, or all of a tensor over the steps before (core/train/fp8_amax.py); None without FP8. scaled: the
    loss is scaled (core/train/loss_scale.py). peak: the format whose dense peak the run is held against. bounds_of:
    the policy whose clean runs set the bounds of its checks, if it is another one.
    """

    name: str
    operand: str
    stream: str = "fp32"
    fp8: Recipe | None = None
    scaled: bool = False
    peak: str = ""
    bounds_of: str = ""

    @property
    def rounds(self) -> bool:
        """Return whether operands are rounded to a narrower format than the stream's."""
        return self.operand != self.stream

    @property
    def exact(self) -> bool:
        """Return whether everything is in FP64: neither the step nor the optimizer rounds to a narrower format."""
        return FORMATS[self.stream].bytes == FORMATS["fp64"].bytes

    @property
    def in_fp32(self) -> bool:
        """Return whether everything is in FP32."""
        return not self.rounds and not self.exact

    @property
    def on_tensor_cores(self) -> bool:
        """Return whether CUDA's tensor cores alone know its operands' format."""
        return FORMATS[self.operand].as_read


POLICIES: dict[str, PrecisionPolicy] = {
    policy.name: policy
    for policy in (
        PrecisionPolicy("fp64", "fp64", stream="fp64"),
        PrecisionPolicy("fp32", "fp32"),
        PrecisionPolicy("tf32", "tf32"),
        PrecisionPolicy("bf16", "bf16"),
        # FP16 runs at bf16's rate.
        PrecisionPolicy("fp16", "fp16", scaled=True, peak="bf16"),
        # A run with any layer in FP8 is compared with FP8's peak.
        PrecisionPolicy("fp8_tensorwise", "bf16", fp8="tensorwise", peak="fp8"),
        PrecisionPolicy("fp8_rowwise", "bf16", fp8="rowwise", peak="fp8"),
        # The casts of tensorwise, with scales that another tensor has made.
        PrecisionPolicy("fp8_delayed", "bf16", fp8="delayed", peak="fp8", bounds_of="fp8_tensorwise"),
    )
}


def narrowed(x: np.ndarray, name: str) -> np.ndarray:
    """Round float32 numbers to the nearest of `bf16` or `fp16`, ties to even, kept in x's dtype; others as they are."""
    if name == "fp16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(x.dtype)
    if name != "bf16":
        return x
    bits = x.astype(np.float32).view(np.uint32)
    up = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), up.view(np.float32), x).astype(x.dtype)
