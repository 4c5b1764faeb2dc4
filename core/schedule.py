"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math

from core.config import OptimConfig


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 1 to `total_steps`).

    Linear warm-up, then half a cosine down to a minimum ratio (Loshchilov & Hutter 2017, without restarts)::

        step ≤ W:  peak · step / W
        step > W:  peak · (r + (1 − r) · (1 + cos(π · (step − W) / (T − W))) / 2)

    with W warm-up steps, T total steps, r = `min_lr_ratio`. Step 1 has lr peak / W, above 0; step T has peak · r.
    Raises ValueError for a step below 1.
    """
    if step < 1:
        raise ValueError(f"steps count from 1, not {step}")
    warmup = optim.warmup_steps
    if step <= warmup:
        return optim.peak_lr * step / warmup
    progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    return optim.peak_lr * (
        optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
    )
