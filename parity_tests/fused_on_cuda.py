"""Compute torch's fused AdamW and Adam on the CPU with the roundings of their CUDA kernels.

On an H200, AdamW was equal to the kernel bit for bit (parity_tests/gpu/test_watch.py). Adam with weight decay was not
equal in all bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.torch_backend.optim import fused_adam_in_fp32


def _float(x: Any) -> float:
    """Return a number rounded to FP32."""
    return float(torch.tensor(float(x), dtype=torch.float32))


def in_fp32(decoupled: bool, beta2_off: float = 0.0) -> Callable[..., None]:
    """Return a replacement for `torch._fused_adamw_` (decoupled) or `torch._fused_adam_`.

    beta2_off: a planted fault, added to β₂.
    """

    def step(
        params: Sequence[Tensor], grads: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor],
        largest: Sequence[Tensor], steps: Sequence[Tensor], *, lr: Any, beta1: float, beta2: float,
        weight_decay: float, eps: float, amsgrad: bool, maximize: bool, grad_scale: Any = None, found_inf: Any = None,
    ) -> None:  # fmt: skip
        rate, b1, b2, decay, epsilon = map(_float, (lr, beta1, beta2 + beta2_off, weight_decay, eps))
        for i, (p, g, first, second, t) in enumerate(zip(params, grads, firsts, seconds, steps, strict=True)):
            x, grad, m, v = (one.detach().double() for one in (p, g, first, second))

            def narrow(value: Tensor) -> Tensor:
                return value.float().double()

            grad = -grad if maximize else grad
            if decay and decoupled:
                x = narrow(x - _float(rate * decay) * x)
            elif decay:
                grad = narrow(grad + decay * x)
            square = narrow(grad * grad)
            m = narrow(b1 * m + narrow(grad - b1 * grad))
            v = narrow(b2 * v + narrow(square - b2 * square))
            over = v
            if amsgrad:
                over = torch.maximum(largest[i].double(), v)
                largest[i].copy_(over)
            c1, c2 = (_float(1 - _float(beta ** float(t))) for beta in (b1, b2))
            below = narrow(narrow(narrow(over.sqrt()) / _float(c2**0.5)) + epsilon)
            moved = narrow(narrow(_float(rate / c1) * m) / below)
            with torch.no_grad():
                p.copy_(x - moved)
                first.copy_(m)
                second.copy_(v)

    return step


@contextmanager
def fused_on_cuda(monkeypatch: pytest.MonkeyPatch, beta2_off: float = 0.0) -> Any:
    """Replace torch's fused Adam and AdamW on the CPU by `in_fp32` inside a `with` block."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_fused_adamw_", in_fp32(True, beta2_off))
        patch.setattr(torch, "_fused_adam_", in_fp32(False, beta2_off))
        fused_adam_in_fp32.cache_clear()
        yield
    fused_adam_in_fp32.cache_clear()
