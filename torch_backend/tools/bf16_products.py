"""Measure how slow this CPU's bf16 matrix products are.

Without instructions for bf16 (on x86: AVX-512 or AMX), oneDNN computes a bf16 product with a plain loop, some hundred
times as slow as in FP32. torch has no public function that reports this: `torch.backends.cpu.get_cpu_capability` names
the vector width of torch's own kernels, but oneDNN selects the kernel of a product. Therefore a product is timed.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

SIZE, TIMES = 256, 3


def bf16_slowdown() -> float:
    """Return time of a bf16 product on this CPU / time of the same product in FP32; below 1 if bf16 is faster.

    Each time is the best of TIMES products of square matrices after one warm-up. The measurement takes a quarter of a
    second. It uses one thread: with several, a busy machine delays the short FP32 product.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _seconds(torch.bfloat16) / max(_seconds(torch.float32), 1e-9)
    finally:
        torch.set_num_threads(threads)


def _seconds(dtype: torch.dtype) -> float:
    a = torch.ones(SIZE, SIZE, dtype=dtype)
    times = []
    for _ in range(TIMES + 1):
        started = time.perf_counter()
        _product(a)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _product(a: Tensor) -> Tensor:
    return a @ a
