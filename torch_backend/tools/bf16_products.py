"""Measure how slow this CPU's bf16 products are.

Without instructions for bf16 (on x86: AVX-512 or AMX), oneDNN leaves a product to a plain loop, some hundred times as
slow as FP32's. torch has no public question for it: `torch.backends.cpu.get_cpu_capability` names the vector width of
torch's own kernels, and which product takes which path is up to oneDNN. A product that is timed has the answer.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

SIZE, TIMES = 256, 3


def bf16_slowdown() -> float:
    """Return the seconds of a bf16 product on this CPU over those of the same product in FP32, in a quarter second.

    The best of TIMES products of square matrices after one that does not count; below 1 where bf16 is faster. One
    thread makes them: with several, the short FP32 product waits for threads that other programs hold up.
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
