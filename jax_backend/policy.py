"""Translate a precision policy for the reference: the dtype of its arrays, and the format operands are rounded to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jax import Array

from lockstep.jax_backend.kernels.formats import Format, rounded

Kernel = Literal["cpu", "cuda", "math"]


@dataclass(frozen=True)
class Policy:
    """stream: dtype of every array. operand: format of matrix operands, or None. narrow_output: and of their products.

    kernel: whose roundings attention follows: torch's fused kernels on the CPU or on CUDA, or `math`
            (jax_backend/attention.py).
    """

    name: str
    stream: Any
    operand: Format | None
    narrow_output: bool = True
    kernel: Kernel = "cpu"

    def round(self, x: Array) -> Array:
        """X with its values rounded, to nearest even, to the operand format."""
        return x if self.operand is None else rounded(x, self.operand)

    def round_output(self, x: Array) -> Array:
        """The same of a product, whose operand format TF32 leaves as FP32."""
        return self.round(x) if self.narrow_output else x
