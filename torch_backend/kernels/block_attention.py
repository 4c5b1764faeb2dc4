"""Causal attention of bf16 or FP32 operands on the CPU, by oneDNN's block product (block_attention.cpp).

It is FlashAttention-2 (Dao 2023). In bf16 it rounds as torch's flash kernel on CUDA does: P and dS become bf16 before
their products, and gradients are summed in FP32. torch's flash kernel on the CPU adds the gradients of k and v in bf16,
one block of queries after another, and takes its products from BLAS (docs/results/cpu_auto.md). In FP32 nothing is
rounded between the products.

On a processor without bf16 instructions the products are those of FP32 numbers that bf16 holds: the same roundings, and
sums in another order.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.core.config.auto import builds_bf16_products
from lockstep.core.errors import UserError
from lockstep.torch_backend.kernels.cpp import NotBuilt, library

SOURCE = Path(__file__).with_suffix(".cpp")
# Formats of operands in block_attention.cpp. WIDENED: bf16 that is multiplied in 32 bits.
IN_BF16, IN_FP32, WIDENED = range(3)


def block_attention(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, scale: float) -> Tensor:
    """Return softmax(q·kᵀ·scale)·v, (B, H, S, E); a query sees the keys up to its own position.

    Operands are all bf16 or all FP32, and so is the result. Heads of queries are a multiple of those of keys: each
    group has the keys of its own. In bf16, E is even. Raises ValueError for other operands.
    """
    out: Tensor = torch.ops.lockstep.attention.default(q_BHSE, k_BKSE, v_BKSE, scale)[0]
    return out


# Operations of their own: checkpointing keeps the output (torch_backend/kernels/recompute.py), and Inductor calls them.
torch.library.define("lockstep::attention", "(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor, Tensor)")
torch.library.define(
    "lockstep::attention_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float scale) -> (Tensor, Tensor, Tensor)",
)


@torch.library.impl("lockstep::attention", "CPU")
def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    _check(q, k, v)
    q, k, v = _readable(q), _readable(k), _readable(v)
    out, lse = _shape_of_attention(q, k, v, scale)
    if q.numel():
        arrays = (x.data_ptr() for x in (q, k, v, out, lse))
        described = _shape(q, k), _strides(q, k, v), _format_of(q.dtype)
        _raise(build(q.dtype).lockstep_attention(*arrays, *described, scale))
    return out, lse


@torch.library.register_fake("lockstep::attention")
def _shape_of_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return _by_tokens(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.impl("lockstep::attention_backward", "CPU")
def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, out, grad)
    grad, q, k, v, out = _readable(grad), _readable(q), _readable(k), _readable(v), _readable(out)
    lse = lse.contiguous()
    made = _shapes_of_gradients(grad, q, k, v, out, lse, scale)
    if q.numel():
        arrays = (x.data_ptr() for x in (q, k, v, out, grad, lse, *made))
        described = _shape(q, k), _strides(q, k, v, out, grad), _format_of(q.dtype)
        _raise(build(q.dtype).lockstep_attention_backward(*arrays, *described, scale))
    return made


@torch.library.register_fake("lockstep::attention_backward")
def _shapes_of_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _by_tokens(q), _by_tokens(k), _by_tokens(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *operands, ctx.scale = inputs
    ctx.save_for_backward(*operands, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *torch.ops.lockstep.attention_backward.default(grad, *ctx.saved_tensors, ctx.scale), None


torch.library.register_autograd("lockstep::attention", _backward, setup_context=_keep)


def _check(q: Tensor, k: Tensor, v: Tensor, *of_shape_of_q: Tensor) -> None:
    dtypes = {x.dtype for x in (q, k, v, *of_shape_of_q)}
    if dtypes not in ({torch.bfloat16}, {torch.float32}):
        named = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ValueError(f"block_attention takes operands that are all bf16 or all FP32, not {named}")
    batch, heads, length, width = q.shape
    of_keys = k.shape[1]
    fits = k.shape == v.shape == (batch, of_keys, length, width) and heads == heads // max(of_keys, 1) * of_keys
    if not fits or any(x.shape != q.shape for x in of_shape_of_q):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, *of_shape_of_q))
        raise ValueError(f"block_attention: operands of the shapes {shapes} do not fit together")
    if dtypes == {torch.bfloat16} and width % 2:
        raise ValueError(f"block_attention multiplies pairs of bf16 numbers, and heads are {width} wide: odd")


def _by_tokens(x_BHSE: Tensor) -> Tensor:
    """Return an empty tensor of the shape of x, with a token's heads side by side, as the next product reads them."""
    batch, heads, length, width = x_BHSE.shape
    return x_BHSE.new_empty(batch, length, heads, width).transpose(1, 2)


def _readable(x: Tensor) -> Tensor:
    """Return x with a head's elements side by side, in rows that do not overlap."""
    return x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()


def _shape(q: Tensor, k: Tensor) -> Any:
    return _integers(q.shape[0], q.shape[1], k.shape[1], q.shape[2], q.shape[3])


def _strides(*tensors: Tensor) -> Any:
    return _integers(*(stride for tensor in tensors for stride in tensor.stride()[:3]))


def _format_of(dtype: torch.dtype) -> int:
    if dtype == torch.float32:
        return IN_FP32
    return IN_BF16 if builds_bf16_products() else WIDENED


def _integers(*values: int) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def _raise(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(f"oneDNN's block product: {error.decode()}")


@cache
def build(dtype: torch.dtype) -> Any:
    """Build and load the C++ functions, for operands of a dtype.

    Raises UserError if they cannot be built, or if oneDNN has no product of that dtype on this processor.
    """
    try:
        loaded = library(SOURCE)
    except NotBuilt as error:
        raise UserError(_refusal(str(error))) from error
    for name, pointers in (("lockstep_attention", 7), ("lockstep_attention_backward", 11)):
        function = getattr(loaded, name)
        function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int, ctypes.c_float]
        function.restype = ctypes.c_char_p
    one = torch.ones(1, 1, 2, 2, dtype=dtype)
    out, lse = _shape_of_attention(one, one, one, 1.0)
    arrays = (x.data_ptr() for x in (one, one, one, out, lse))
    if said := loaded.lockstep_attention(*arrays, _shape(one, one), _strides(one, one, one), _format_of(dtype), 1.0):
        raise UserError(_refusal(said.decode().splitlines()[0]))
    return loaded


def _refusal(reason: str) -> str:
    return f"attention.kernel = 'flash_brgemm' cannot be used on this machine ({reason}); take 'flash'"
