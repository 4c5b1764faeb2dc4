"""The micro-batches of a step, on one rank or on all ranks, and the sum of their gradients."""

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

    The step's loss is Σ weight·loss / (count · divisor) over micro-batches. weights: one weight per micro-batch.
    divisor: divisor of the finished sum over ranks. last: True for the last rank's micro-batch of each number.
    """

    batches: Sequence[Any]
    weights: Sequence[float]
    count: float
    divisor: float
    last: Sequence[bool]

    def scaled(self, loss: Tensor, i: int) -> Tensor:
        """Return a micro-batch's loss · weight / count."""
        loss = loss / self.count if self.count != 1 else loss
        return loss * self.weights[i] if self.weights[i] != 1 else loss


def parts_of(batch: Any, given: Any, accumulate: Accumulate, divisor: float) -> Parts:
    """Split a step into its micro-batches.

    batch: the batch for the copy. given: the user's batch, for a function `accumulate`. divisor: divisor of the sum
    over ranks, if the batches of all ranks were gathered. Raises UserError if a list of micro-batches is missing.
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
    # The step's loss is the sum over ranks / divisor, so weights of a sum are multiplied by the divisor.
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
    """The gradients of a copy, summed over micro-batches: in `.grad`, or with FSDP's casts as FSDP sums them."""

    def __init__(self, model: nn.Module, casts: Casts, divisor: float) -> None:
        self._params = {name: p for name, p in parameters_of(model).items() if p.requires_grad}
        self._casts, self._divisor = casts, divisor
        self._of_ranks: dict[str, Tensor] = {}
        self._total: dict[str, Tensor] = {}

    def after_part(self, last: bool) -> None:
        """Add the gradients of one backward pass. last: it was the last rank's micro-batch of this number."""
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
        """Return the dtype of a parameter's gradient in training."""
        return self._casts.kept.get(name, self._params[name].dtype)

    def gradients(self, elsewhere: dict[str, Tensor]) -> dict[str, np.ndarray]:
        """Return the step's gradients, zeros for parameters without one.

        elsewhere: gradients that are not in `.grad`, by name; they are removed from it.
        """
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
