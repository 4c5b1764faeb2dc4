"""Read a step during its course: right before the update, right after it, and after the backward pass of a closure.

torch calls an optimizer's pre-hooks before `step(closure)` calls the closure. Forward and backward passes run inside
the closure, for example in Lightning's automatic optimisation and with LBFGS. The hook therefore replaces the closure
by a wrapper, which reads gradients and loss right after the closure returns and before the optimizer uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.core.backend import Arrays
from lockstep.core.errors import UserError
from lockstep.core.parity.measures.verdict import Finding
from lockstep.core.parity.watch.observed import Observed
from lockstep.core.parity.watch.snapshot import Snapshot, array_of, gradients_of, plainly, share_equal, snapshot
from lockstep.core.parity.watch.uncovered import Guard, Uncovered


@dataclass
class Pending:
    """A step under check, with all that was read so far.

    before, after: a snapshot an optimizer, right before and right after its step; None if not read.
    fired: number of steps of each optimizer.
    between: findings about weights and moments between two steps.
    started: value of the performance counter at the beginning, in seconds.
    stale: parameters whose gradients a closure computed after another optimizer had changed the weights.
    early: gradients and loss were read inside the closure, before it clips.
    layouts: layouts of gradients that are sharded over ranks (core/parity/watch/together.py).
    observed: findings of single operations, which are judged before the weights change.
    """

    number: int
    batch: Any
    loss: float | None
    outputs: Arrays
    params: Arrays
    grads: Arrays
    before: list[Snapshot | None]
    after: list[Snapshot | None]
    fired: list[int]
    between: list[Finding]
    started: float
    uncovered: Uncovered
    stale: set[str] = field(default_factory=set)
    handles: list[Any] = field(default_factory=list)
    early: bool = False
    layouts: dict[str, Any] = field(default_factory=dict)
    observed: Observed | None = None


def alone(moment: str) -> Callable[..., np.ndarray]:
    """Return the function with which a single rank reads tensors, the same at each moment."""
    return plainly


def listen(
    pending: Pending, i: int, optimizer: Any, params: Mapping[str, Any], guard: Guard,
    at: Callable[[str], Callable[..., np.ndarray]] = alone,
) -> None:  # fmt: skip
    """Register hooks that copy the optimizer's inputs right before its step and its results right after it.

    Clipping and learning-rate schedules run outside of these two moments.
    i: index of the optimizer.
    at: moment of the step → the function that reads a tensor then (core/parity/watch/together.py).
    """
    depth = 0  # the step of a subclass may call its parent's, which has the hooks too

    def read() -> None:
        with guard.link(pending.uncovered, "update"):
            pending.before[i] = found = snapshot(params, [optimizer], at("update"))
            share_equal(found.params, pending.params)
            share_equal(found.grads, pending.grads)

    def after_closure(result: Any) -> None:
        """Read the gradients and the loss of the closure before the optimizer uses them."""
        with guard.link(pending.uncovered, "gradients"):
            if any(pending.fired):
                held = {id(p) for group in optimizer.param_groups for p in group["params"]}
                pending.stale |= {name for name, p in params.items() if id(p) in held}
                pending.grads = {name: g for name, g in pending.grads.items() if name not in pending.stale}
            elif not pending.early:
                pending.grads = gradients_of(params, at("backward"))
                pending.loss = pending.loss if (number := number_of(result)) is None else number
        read()

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        nonlocal depth
        depth += 1
        if depth > 1 or pending.fired[i]:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            read()
            return None
        wrapped = _once_then(closure, after_closure)
        return (args[0], wrapped, *args[2:]) if len(args) > 1 else args, kwargs | (
            {} if len(args) > 1 else {"closure": wrapped}
        )

    def after(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            pending.fired[i] += 1
            with guard.link(pending.uncovered, "update"):
                pending.after[i] = snapshot(params, [optimizer], at("after"), gradients=False)

    if hasattr(optimizer, "register_step_post_hook"):
        pending.handles += [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    else:
        read()


def _once_then(closure: Callable[[], Any], then: Callable[[Any], None]) -> Callable[[], Any]:
    """Wrap a closure. After its first call, `then` is called with its result."""
    first = True

    def wrapped() -> Any:
        nonlocal first
        result = closure()
        if first:
            first = False
            then(result)
        return result

    return wrapped


def number_of(loss: Any) -> float | None:
    """Return a loss as a Python float; None if it is not one number."""
    try:
        value = array_of(loss)
        return float(value.reshape(())) if value.size == 1 else None
    except (TypeError, ValueError):
        return None


def loss_of(loss: Any) -> float | None:
    """Return the loss given to `step` as a float, or None. Raises UserError if it is not one number."""
    if loss is None:
        return None
    value = array_of(loss)
    if value.size != 1:
        raise UserError(f"loss is one number; this one has shape {value.shape}")
    if (number := number_of(loss)) is None:
        raise UserError(f"loss is one number; this one is of type {type(loss).__name__}")
    return number
