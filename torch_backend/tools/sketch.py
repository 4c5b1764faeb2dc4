"""Sketches in torch, eager or compiled. Twin: core/parity/evidence/sketch.py, which defines a sketch.

A sign is a hash of its coordinate. Signs are computed for a sketch, or read from a table that many sketches share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.core.parity.evidence.observations import Observation
from lockstep.core.parity.evidence.sketch import GOLDEN, MULTIPLIERS, SHIFTS, K
from lockstep.core.parity.measures.calibrated_bounds import independent


def _signed(constant: int) -> int:
    """Convert a 32-bit constant to the int32 with the same bits."""
    return constant - (1 << 32) if constant >> 31 else constant


def _shifted(h: Tensor, shift: int) -> Tensor:
    """Shift int32 to the right logically; torch's own shift repeats the sign bit."""
    return (h >> shift) & ((1 << (32 - shift)) - 1)


def signs(start: int, count: int, device: torch.device | None = None) -> Tensor:
    """Return the signs of coordinates start … start + count − 1 as float32, ±1; start may exceed 2³²."""
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


def sketch(x: Tensor, offset: int = 0, table: Tensor | None = None) -> Tensor:
    """Return S(x), (K,), for coordinates offset … offset + size − 1: float64 for float64 input, else float32.

    table: the first signs, int8, or None to compute them. A program with a hundred sketches compiles ten times as fast
    with a table. With an offset, signs are always computed.
    """
    flat = x.reshape(-1).to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    sign = signs(offset, flat.numel(), x.device) if table is None or offset else table

    def signed(start: int, stop: int) -> Tensor:
        return flat[start:stop] * sign[start:stop].to(flat.dtype)

    # Sum the end of the first row, whole rows, and a partial last row. Padding to whole rows takes twice the time,
    # because a compiled program then tests every number for padding.
    column, size = offset % K, flat.numel()
    begun = min(-offset % K, size)
    rows = (size - begun) // K
    whole = begun + rows * K
    total = signed(begun, whole).view(rows, K).sum(0)
    total = total + F.pad(signed(whole, size), (0, whole + K - size))
    return total + F.pad(signed(0, begun), (column, K - column - begun)) if begun else total


def lift(probe: Tensor, shape: tuple[int, ...], table: Tensor | None = None) -> Tensor:
    """Return Sᵀ·probe: (K,) → `shape`, in the probe's dtype. The probe's gradient is the sketch of the result's."""
    size = math.prod(shape)
    rows = -(-size // K)
    sign = signs(0, rows * K, probe.device) if table is None else table[: rows * K]
    signed = probe.expand(rows, K).reshape(-1) * sign.to(probe.dtype)
    return signed[:size].view(shape)


def statistics(x: Tensor) -> Tensor:
    """Return (4,) float64: L2 norm, largest magnitude, mean, count of non-finite values."""
    wide = x.double()
    # A compiled program sums int32 into int64 in half the time of a sum of bool.
    nonfinite = (~torch.isfinite(x)).to(torch.int32).sum()
    return torch.stack([wide.square().sum().sqrt(), x.abs().max().double(), wide.mean(), nonfinite.double()])


Kept = tuple[Tensor, Tensor]  # sketch (K,) and statistics (4,)


def sign_table(size: int, device: torch.device) -> Tensor:
    """Return the first signs as int8, for tensors of at most `size` elements."""
    return signs(0, size + K, device).to(torch.int8)


def sketches_of(tensors: Mapping[str, Tensor], table: Tensor) -> dict[str, Kept]:
    """Compute sketch and statistics of each tensor, by name: one program for all gradients of a step."""
    return {name: (sketch(x, table=table), statistics(x)) for name, x in tensors.items()}


def whole_observation(kept: Kept, shape: tuple[int, ...]) -> Observation:
    """Copy sketch and statistics of a tensor of `shape` to the host, and return its observation."""
    norm, max_abs, mean, nonfinite = kept[1].tolist()
    return Observation(
        kept[0].detach().cpu().numpy(), norm, max_abs, mean, int(nonfinite), math.prod(shape), independent(shape)
    )


def sketch_alone(probe_gradient: Tensor, shape: tuple[int, ...]) -> Observation:
    """Return the observation of a tensor of `shape` from its sketch: an estimated norm; maximum and mean are NaN."""
    values = probe_gradient.detach().cpu().numpy()
    norm = float(np.linalg.norm(values.astype(np.float64)))
    nonfinite = int(np.count_nonzero(~np.isfinite(values)))
    return Observation(values, norm, math.nan, math.nan, nonfinite, math.prod(shape), independent(shape))
