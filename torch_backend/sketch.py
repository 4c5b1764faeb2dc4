"""Sketches in torch, eager or inside a compiled program. Twin: core/parity/sketch.py, which says what a sketch is.

Signs are computed where they are used, not read from memory: inside a compiled program the hash is fused into the sum.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from core.parity.sketch import GOLDEN, MULTIPLIERS, SHIFTS, K


def _signed(constant: int) -> int:
    """A 32-bit constant as the int32 of the same bits."""
    return constant - (1 << 32) if constant >> 31 else constant


def _shifted(h: Tensor, shift: int) -> Tensor:
    """Logical shift to the right of int32, whose own shift repeats the sign."""
    return (h >> shift) & ((1 << (32 - shift)) - 1)


def signs(start: int, count: int, device: torch.device | None = None) -> Tensor:
    """Signs of the coordinates start … start + count − 1 as float32, ±1; start may exceed 2³²."""
    if start + count <= 1 << 31:
        h = torch.arange(start, start + count, dtype=torch.int32, device=device)
    else:
        n = torch.arange(start, start + count, dtype=torch.int64, device=device)
        high = (n >> 32).to(torch.int32)
        h = n.to(torch.int32) ^ (high * _signed(GOLDEN))
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        h = (h ^ _shifted(h, shift)) * _signed(multiplier)
    h = h ^ _shifted(h, SHIFTS[2])
    return 1.0 - 2.0 * (h & 1).to(torch.float32)


def sketch(x: Tensor, offset: int = 0) -> Tensor:
    """S(x) for the row-major coordinates offset … offset + size − 1: (K,), float64 for float64 input, else float32."""
    flat = x.reshape(-1).to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    before = offset % K
    rows = -(-(before + flat.numel()) // K)
    padded = F.pad(flat, (before, rows * K - before - flat.numel()))
    signed = padded * signs(offset - before, rows * K, x.device).to(flat.dtype)
    return signed.view(rows, K).sum(0)


def lift(probe: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sᵀ·probe: (K,) → `shape` in the probe's dtype. The probe's gradient is the sketch of the result's."""
    size = math.prod(shape)
    rows = -(-size // K)
    signed = probe.expand(rows, K).reshape(-1) * signs(0, rows * K, probe.device).to(probe.dtype)
    return signed[:size].view(shape)


def statistics(x: Tensor) -> Tensor:
    """(4,) float64: L2 norm, largest magnitude, mean, count of non-finite values."""
    wide = x.double()
    count = x.numel() - torch.isfinite(x).sum()
    return torch.stack([wide.square().sum().sqrt(), wide.abs().max(), wide.mean(), count.double()])
