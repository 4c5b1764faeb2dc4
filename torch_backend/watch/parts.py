"""The micro-batches of a step, of one rank or of all, and the sum of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.errors import UserError
from lockstep.core.parity.watch.snapshot import array_of, parameters_of
from lockstep.core.parity.watch.together import Gathered
from lockstep.torch_backend.watch.sharded_module import Casts

Weights = Callable[[Sequence[Any]], Sequence[float]]
Accumulate = Literal["mean", "sum"] | Weights | None


@dataclass(frozen=True)
class Parts:
    """The micro-batches of a step, in the order in which their gradients are added.

    weights, count: the step's loss is the sum of each one's times its weight, over count and over divisor. divisor:
    what the sum over ranks is divided by, after it is made. last: whether a micro-batch is the last rank's of its
    number.
    """

    batches: Sequence[Any]
    weights: Sequence[float]
    count: float
    divisor: float
    last: Sequence[bool]

    def scaled(self, loss: Tensor, i: int) -> Tensor:
        """Scale a micro-batch's loss by its rank's weight."""
        loss = loss / self.count if self.count != 1 else loss
        return loss * self.weights[i] if self.weights[i] != 1 else loss


def parts_of(batch: Any, given: Any, accumulate: Accumulate, divisor: float) -> Parts:
    """Take a step apart.

    batch: as the copy computes with it. given: as the user has it. divisor: what the sum over ranks is divided by,
    where the batches of all were gathered. Raises UserError for what is no list of micro-batches.
    """
    if not isinstance(batch, Gathered):
        if accumulate is None:
            return Parts([batch], [1.0], 1, 1, [True])
        _check_list(batch)
        weights = _weights(accumulate, given, len(batch))
        return Parts(batch, weights, len(batch) if accumulate == "mean" else 1, 1, [True] * len(batch))
    lists = [[one] for one in batch.batches] if accumulate is None else list(batch.batches)
    for one in lists:
        _check_list(one)
    flat = [(i, rank) for rank, one in enumerate(lists) for i in range(len(one))]
    users = [part for one in given.batches for part in one] if callable(accumulate) else []
    weighed = dict(zip(flat, _weights(accumulate, users, len(flat)), strict=True))
    order = sorted(flat)
    last = [k + 1 == len(order) or order[k + 1][0] != i for k, (i, _) in enumerate(order)]
    # A rank's own loss is such that the sum over ranks, divided, is the step's.
    scale = 1.0 if accumulate in (None, "mean") else divisor
    count = len(flat) / divisor if accumulate in (None, "mean") else 1
    return Parts([lists[r][i] for i, r in order], [weighed[one] * scale for one in order], count, divisor, last)


def _check_list(batch: Any) -> None:
    if not isinstance(batch, (list, tuple)) or not batch:
        raise UserError("accumulate= was given, so step takes the list of the step's micro-batches")


def _weights(accumulate: Accumulate, given: Any, count: int) -> list[float]:
    weights = list(map(float, accumulate(given))) if callable(accumulate) else [1.0] * count
    if len(weights) != count:
        raise UserError(f"accumulate= returned {len(weights)} weights for {count} micro-batches")
    return weights


class Sums:
    """The gradients of a copy, added over micro-batches: in `.grad`, or where FSDP casts as FSDP adds them."""

    def __init__(self, model: nn.Module, casts: Casts, divisor: float) -> None:
        self._params = {name: p for name, p in parameters_of(model).items() if p.requires_grad}
        self._casts, self._divisor = casts, divisor
        self._of_ranks: dict[str, Tensor] = {}
        self._total: dict[str, Tensor] = {}

    def after_part(self, last: bool) -> None:
        """Add what a backward pass left. last: it was the last rank's of this micro-batch."""
        if not self._casts:
            return
        for name, p in self._params.items():
            if p.grad is None:
                continue
            grad = p.grad.to(self._casts.reduced.get(name, p.grad.dtype))
            self._of_ranks[name] = self._of_ranks[name] + grad if name in self._of_ranks else grad
            p.grad = None
        if last:
            for name, grad in self._of_ranks.items():
                kept = (grad / self._divisor if self._divisor != 1 else grad).to(self._kept(name))
                self._total[name] = self._total[name] + kept if name in self._total else kept
            self._of_ranks = {}

    def _kept(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter's gradient where it trains."""
        return self._casts.kept.get(name, self._params[name].dtype)

    def gradients(self, elsewhere: dict[str, Tensor]) -> dict[str, np.ndarray]:
        """Return the step's gradients, zeros where none came. elsewhere: those in no `.grad`; it is emptied."""
        found = {}
        for name, p in self._params.items():
            if self._casts:
                grad = self._total.get(name)
                found[name] = array_of(torch.zeros_like(p, dtype=self._kept(name)) if grad is None else grad)
                continue
            grad, p.grad = elsewhere.pop(name, p.grad), None
            grad = torch.zeros_like(p) if grad is None else grad
            grad = grad / self._divisor if self._divisor != 1 else grad
            # No other reference to the gradient exists, so its memory need not be copied.
            shared = grad.dtype in (torch.float32, torch.float64) and grad.is_contiguous()
            found[name] = grad.detach().numpy() if shared else array_of(grad)
        return found
