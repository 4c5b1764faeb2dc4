"""The distribution of micro-batches over ranks: the base class of every strategy of data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.backend import Batch
from lockstep.core.config.schema import ParallelConfig
from lockstep.torch_backend.tools.step_timer import StepTimer

MicroLoss = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# Narrow dtypes of `parallel.gradient_dtype`. The value fp32 means the gradients' own dtype, without a cast.
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Sharing:
    """The distribution of batches over the ranks of the default process group: the base of every strategy.

    calls: number of reductions so far, one for each part of the gradients.
    """

    # True if each rank holds only a part of the weights. Then all ranks take part in every use of the weights.
    sharded = False

    def __init__(self, step_timer: StepTimer, parallel: ParallelConfig) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.calls = 0
        self._step_timer = step_timer
        # This rank's loss of the last step and the extremes of its gradients, before any reduction over ranks.
        self._own_loss: Tensor | None = None
        self._extremes: list[tuple[Sequence[Tensor], Tensor, Tensor]] = []
        # Called before each communication of a step, with its name or "".
        self.on_sent: Callable[[str], None] = lambda what: None
        self._narrow = NARROW.get(parallel.gradient_dtype)

    def shares(self, micros: Sequence[Batch]) -> bool:
        """Return whether these micro-batches are distributed over ranks; else every rank computes all of them."""
        return len(micros) % self.count == 0

    def share(self, micros: Sequence[Batch]) -> Sequence[Batch]:
        """Return this rank's micro-batches, a contiguous part."""
        part = len(micros) // self.count
        return micros[self.rank * part : (self.rank + 1) * part]

    def own(self, micros: Sequence[Batch]) -> Sequence[Batch]:
        """Return the micro-batches that this rank computes: its share, or all if they are not distributed."""
        return self.share(micros) if self.shares(micros) else micros

    def arrange(self, micros: Sequence[Batch], backward: Callable[[MicroLoss], object]) -> None:
        """Prepare the first step of several ranks; do nothing here. backward: runs the first backward pass."""

    def clear(self, parameters: Sequence[Tensor]) -> None:
        """Clear the gradient of each parameter before a step."""
        for p in parameters:
            p.grad = None

    def reduced(self, parameters: Iterable[Tensor]) -> None:
        """Record the gradients after their reduction over ranks; do nothing here."""

    def plan(self, micros: Sequence[Batch]) -> Iterator[MicroLoss]:
        """Yield the program for each of this rank's micro-batches, in order."""
        raise NotImplementedError

    def alone(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Run the training program for a micro-batch that is not distributed; only rank 0's result counts."""
        raise NotImplementedError

    def run(self, program: Callable[..., Any], *inputs: Any) -> Any:
        """Run a program that reads the model's weights."""
        return program(*inputs)

    def total(self, total: Tensor) -> Tensor:
        """Return the divisor of the loss for a micro-batch that is not distributed."""
        return total

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a micro-batch that is not distributed, and store them in `.grad`."""
        loss.backward()

    def grads(self, loss: Tensor, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the gradients of a micro-batch that is not distributed; None for a tensor that has no effect on it."""
        return torch.autograd.grad(loss, wanted, allow_unused=True)

    def norm(self, norms: Tensor) -> Tensor:
        """Return the norms of whole tensors from the norms of this rank's parts."""
        return norms

    def everywhere(self, flags: Sequence[bool]) -> Sequence[bool]:
        """Return the element-wise OR of flags over ranks."""
        return flags

    def not_finite(self, loss: float) -> tuple[float, set[int]]:
        """Return this rank's own loss of the last step, and the ids of parameters with gradients that were not finite.

        The gradients are this rank's, before the reduction. loss: the loss of all ranks, returned if `together` did not
        run, as in a session with an `accumulate` of its own.
        """
        odd = [params for params, *ends in self._extremes if not all(bool(end.isfinite()) for end in ends)]
        own = loss if self._own_loss is None else self._own_loss.item()
        return own, {id(p) for params in odd for p in params}

    def most(self, found: Tensor) -> None:
        """Replace each element by the maximum over ranks, in place."""
        self.on_sent("the amaxes of FP8" if self.sharded else "")
        dist.all_reduce(found, op=dist.ReduceOp.MAX)

    def together(self, loss: Tensor, nll: list[Tensor], shown: bool) -> tuple[Tensor, list[Tensor]]:
        """Sum the loss over ranks; if `shown`, also gather the per-token NLL in the batch's order."""
        self.on_sent("the sum of the losses" if self.sharded else "")
        self._own_loss = loss.clone()
        dist.all_reduce(loss)
        if shown:
            mine = torch.cat(nll)
            nll = [torch.empty_like(mine) for _ in range(self.count)]
            dist.all_gather(nll, mine)
        return loss, nll
