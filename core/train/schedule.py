"""Learning rate and sequence length as pure functions of the step (docs/guide/schedules.md)."""

from __future__ import annotations

import math
from bisect import bisect_left

from lockstep.core.config.curriculum import last_steps, pieces
from lockstep.core.config.schema import OptimConfig, TrainConfig


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 1 to `total_steps`), before a group's factor.

    Let W be the warm-up steps, T the total steps, D the steps of decay, r = `min_lr_ratio`, and s the step::

        s ≤ W:  peak · s / W
        s > W:  peak · (r + (1 − r) · f(x))

        cosine  x = (s − W) / (T − W)              f = (1 + cos πx) / 2     (Loshchilov & Hutter 2017, no restarts)
        linear  x = (s − W) / (T − W)              f = 1 − x
        wsd     x = max(s − (T − D), 0) / D        f = 1 − x or 1 − √x

    wsd is warm-up, stable, decay (Hu et al. 2024, MiniCPM). The shapes of its decay, linear and 1 − √, are those of
    Hägele et al. 2024, section 3. Every schedule is continuous at W and at T − D, is above 0 at step 1, and is peak · r
    from step T on. Raises ValueError for a step below 1.
    """
    if step < 1:
        raise ValueError(f"steps count from 1, not {step}")
    warmup = optim.warmup_steps
    if step <= warmup:
        return optim.peak_lr * step / warmup
    falling = decay_steps(optim, total_steps)
    done = min(max(step - (total_steps - falling), 0) / max(falling, 1), 1.0)
    if not done:
        return optim.peak_lr
    return optim.peak_lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * _left(optim, done))


def decay_steps(optim: OptimConfig, total_steps: int) -> int:
    """Return the number of steps, at the end of the run, in which the rate decreases.

    For wsd it is `decay_share` · T, rounded, and at least one; for other schedules, all steps after the warm-up.
    """
    if optim.schedule == "wsd":
        return max(round(optim.decay_share * total_steps), 1)
    return total_steps - optim.warmup_steps


def _left(optim: OptimConfig, done: float) -> float:
    """Return f(x) of `learning_rate`: (rate − lowest rate) / (peak − lowest rate). done: x, the share of the decay."""
    if optim.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    if optim.schedule == "wsd" and optim.decay_shape == "sqrt":
        return 1.0 - math.sqrt(done)
    return 1.0 - done


def sequence_length(train: TrainConfig, step: int) -> int:
    """Return the tokens per sequence at step `step`, from 1, by `train.curriculum`; after the end, the last length."""
    found = pieces(train.curriculum)
    if not found:
        return train.sequence_length
    return found[min(bisect_left(last_steps(train.curriculum, train.steps), step), len(found) - 1)].length


def batch_size(train: TrainConfig, step: int) -> int:
    """Return the number of sequences at step `step`, over all ranks; every step has the same number of tokens."""
    return train.batch_size * train.sequence_length // sequence_length(train, step)
