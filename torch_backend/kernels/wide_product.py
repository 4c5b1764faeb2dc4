"""The product of two matrices on the CPU with an FP32 result, by oneDNN's block product (wide_product.cpp).

Operands in bf16: torch has such a product for CUDA (`torch.mm(out_dtype=)`). On the CPU it exports only the block
product, in C++, which multiplies by the processor's own bf16 instructions and sums in FP32. Products of FP32 copies
take two to three times as long (docs/results/wide_product.md).

Operands in FP32: sums of up to 1,024 terms have the order of oneDNN's product of whole matrices. For that one torch
copies a transposed left operand on one core. This one copies blocks on every core, and can add in place.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import UserError
from lockstep.torch_backend.kernels.cpp import NotBuilt, library

SOURCE = Path(__file__).with_suffix(".cpp")
OPERANDS = (torch.bfloat16, torch.float32)


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply two matrices in bf16 or FP32 on the CPU, (m, k) · (k, n) → (m, n) in FP32, without another rounding."""
    made: Tensor = torch.ops.lockstep.wide_product.default(left, right)
    return made


def add_wide_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two matrices in bf16 or FP32 on the CPU to `total`, FP32 (m, n) and contiguous, in place."""
    torch.ops.lockstep.add_wide_product.default(total, left, right)


# Operations of their own: checkpointing keeps the product (torch_backend/kernels/recompute.py), and Inductor does not
# compute it in FP32.
torch.library.define("lockstep::wide_product", "(Tensor left, Tensor right) -> Tensor")
torch.library.define("lockstep::add_wide_product", "(Tensor(a!) total, Tensor left, Tensor right) -> ()")


@torch.library.impl("lockstep::wide_product", "CPU")
def _product(left: Tensor, right: Tensor) -> Tensor:
    made = left.new_empty(left.shape[0], right.shape[1], dtype=torch.float32)
    return _multiply(made, left, right, add=False) if left.shape[1] else made.zero_()


@torch.library.register_fake("lockstep::wide_product")
def _shape_of_product(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1], dtype=torch.float32)


@torch.library.impl("lockstep::add_wide_product", "CPU")
def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    _multiply(total, left, right, add=True)


@torch.library.register_fake("lockstep::add_wide_product")
def _shape_of_sum(total: Tensor, left: Tensor, right: Tensor) -> None:
    pass


def _multiply(total: Tensor, left: Tensor, right: Tensor, *, add: bool) -> Tensor:
    operands_fit = left.dtype == right.dtype in OPERANDS
    if not (operands_fit and total.dtype == torch.float32 and total.is_contiguous()):
        raise ValueError("wide_product multiplies matrices in bf16 or FP32 into a contiguous FP32 matrix")
    (m, k), n = left.shape, right.shape[1]
    if right.shape[0] != k or total.shape != (m, n):
        raise ValueError(f"wide_product: {tuple(left.shape)} · {tuple(right.shape)} is not {tuple(total.shape)}")
    if m and n and k:
        operands = left.data_ptr(), *left.stride(), right.data_ptr(), *right.stride()
        error = build(left.dtype)(*operands, total.data_ptr(), m, n, k, add, left.dtype == torch.float32)
        if error is not None:
            raise RuntimeError(f"oneDNN's block product: {error.decode()}")
    return total


@cache
def build(operand: torch.dtype) -> Any:
    """Build and load the C++ function.

    Raises UserError if it cannot be built, or if oneDNN has no product of this dtype on this processor.
    """
    try:
        function = library(SOURCE).lockstep_wide_product
    except NotBuilt as error:
        raise UserError(_refusal(str(error))) from error
    matrix = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    function.argtypes = [*matrix, *matrix, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_int, ctypes.c_int]
    function.restype = ctypes.c_char_p
    left, total = torch.ones(2, 2, dtype=operand), torch.empty(2, 2)
    one = left.data_ptr(), 2, 1
    if said := function(*one, *one, total.data_ptr(), 2, 2, 2, False, operand == torch.float32):
        raise UserError(_refusal(said.decode().splitlines()[0]))
    return function


def _refusal(reason: str) -> str:
    return f"precision.cpu_products = 'brgemm' cannot be used on this machine ({reason}); take 'blas'"
