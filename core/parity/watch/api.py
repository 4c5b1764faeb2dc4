"""`watch`: compare forward, backward and update of a user's training loop with a reference function.

    watcher = watch(model, optimizer, reference=reference(jax_loss), every=100)
    for batch in data:
        loss = train_loss(model, batch)
        loss.backward()
        with watcher.step(batch, loss):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()

Tensors are only read and copied: model, gradients, optimizer state and random numbers do not change. A step without a
check is only counted, and the one before a check leaves digests of weights and optimizer state. User guide:
docs/guide/watch.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lockstep.core.backend import Arrays
from lockstep.core.errors import UserError
from lockstep.core.parity.watch.limits import Precision
from lockstep.core.parity.watch.settings import Declared, OnAlarm, Settings
from lockstep.core.parity.watch.snapshot import FromCallable, Names, Reference, StepReference, unwrapped
from lockstep.core.parity.watch.together import Ranks
from lockstep.core.parity.watch.update_rules import Rule
from lockstep.core.parity.watch.watcher import Disagreed, Watcher

__all__ = ["Disagreed", "Settings", "Watcher", "watch"]


def watch(
    model: Any,
    optimizer: Any,
    *,
    reference: Reference | StepReference | Callable[[dict[str, np.ndarray], Any], tuple[float, Arrays]],
    every: int = 100,
    precision: Precision | None = None,
    names: Names = None,
    clip_norm: float | None = None,
    declared: Declared | None = None,
    rule: str | Rule | None = None,
    bounds: Mapping[str, float] | None = None,
    calibrate: int = 0,
    on_alarm: OnAlarm = "log",
    start: int = 0,
    weights_change: bool = False,
    together: Ranks | None = None,
) -> Watcher:
    """Watch `model` (any torch module) and `optimizer` (one, or a sequence of them); return the watcher.

    Args:
        model: parameters are read from its `named_parameters()`, gradients from their `.grad`.
        optimizer: hyperparameters and state are read right before and right after its step.
        reference: `lockstep.jax_backend.watch.reference(loss)`, any object with `truth` and `twin`, or a numpy callable
        `(params, batch) -> (loss, gradients)` that computes in the dtype of its parameters.
        every: check the first step, and each step whose number is a multiple of this.
        precision: the model's precision: `fp32`, `bf16` (autocast, or bf16 weights) or `fp64`. Default: its weights'
        dtype.
        names: the model's parameter name → the reference's, a mapping or a function. Default: the same names.
        clip_norm: the norm to which gradients are clipped, inside or before the block.
        declared: hyperparameters that the optimizer should have, or `(parameter name, step) -> hyperparameters`.
        rule: `adamw`, `adam`, `sgd`, `muon`, `adafactor`, or a function as in core/parity/watch/update_rules.py, for an
        optimizer that no library defines. All optimizers use this rule.
        bounds: any of `excess`, `distance`, `gain`, `relative_error` (fp64) and `loss`. These replace the derived
        bounds.
        calibrate: number of first checks that only measure loss and gradients. Bounds are their extremes with a margin.
        on_alarm: action after a check that disagrees. `log` logs it, `stop` raises `Disagreed` after the step, and a
        function is called with the check.
        start: number of steps done before the first watched one, for a resumed run.
        weights_change: True if the loop changes weights outside `optimizer.step()`, to normalize or average them. Such
        changes are then not judged. By default they are faults.
        together: the ranks that train the model with this one. Each has a watcher, and one judgement covers all.
        Default: this rank judges alone.

    Raises UserError for invalid settings. During training only `Disagreed` is raised, under `on_alarm="stop"`. All that
    cannot be judged is logged and listed in the verdict.
    """
    made: Any = reference
    if not (hasattr(reference, "truth") or isinstance(reference, StepReference)):
        made = FromCallable(reference) if callable(reference) else None
    if made is None:
        raise UserError(f"reference={reference!r}: it is a function, or an object with `truth` and `twin`")
    return Watcher(
        model,
        [unwrapped(o) for o in (optimizer if isinstance(optimizer, (list, tuple)) else [optimizer])],
        made,
        Settings(
            every, precision, names, clip_norm, declared, rule, bounds, calibrate, on_alarm, start, weights_change
        ),
        together,
    )
