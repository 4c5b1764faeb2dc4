"""Divide micro-batches among ranks, for every strategy of data parallelism."""

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
# fp32 means the gradients' own dtype, which is float64 under the fp64 policy: nothing is cast.
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Sharing:
    """The sharing of batches among the ranks of the default process group: the base of every strategy.

    `calls` counts the parts of gradients that were reduced so far.
    """

    # If each rank holds only a part of the weights, all ranks must take part in whatever needs them.
    sharded = False

    def __init__(self, step_timer: StepTimer, parallel: ParallelConfig) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.calls = 0
        self._step_timer = step_timer
        # This rank's loss of the last step and the extremes of its gradients, before any reduction over ranks.
        self._own_loss: Tensor | None = None
        self._extremes: list[tuple[Sequence[Tensor], Tensor, Tensor]] = []
        # Called before each part of a step that is sent to the other ranks, with its name if it has one.
        self.on_sent: Callable[[str], None] = lambda what: None
        self._narrow = NARROW.get(parallel.gradient_dtype)

    def shares(self, micros: Sequence[Batch]) -> bool:
        """Return whether these micro-batches are computed by all ranks; else rank 0 computes them alone."""
        return len(micros) % self.count == 0

    def share(self, micros: Sequence[Batch]) -> Sequence[Batch]:
        """Return this rank's micro-batches: its contiguous part of them."""
        part = len(micros) // self.count
        return micros[self.rank * part : (self.rank + 1) * part]

    def own(self, micros: Sequence[Batch]) -> Sequence[Batch]:
        """Return this rank's micro-batches: its share, or all where they are not shared."""
        return self.share(micros) if self.shares(micros) else micros

    def arrange(self, micros: Sequence[Batch], backward: Callable[[MicroLoss], object]) -> None:
        """Do what several ranks need once, before their first step; nothing here. backward: this rank's first one."""

    def clear(self, parameters: Sequence[Tensor]) -> None:
        """Clear the gradient of each parameter, before a step."""
        for p in parameters:
            p.grad = None

    def reduced(self, parameters: Iterable[Tensor]) -> None:
        """Note where the gradients lie after their sum over ranks; nothing here."""

    def plan(self, micros: Sequence[Batch]) -> Iterator[MicroLoss]:
        """Yield the program for each micro-batch that this rank computes of these, in order."""
        raise NotImplementedError

    def alone(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Run the training program for a micro-batch of rank 0 alone."""
        raise NotImplementedError

    def run(self, program: Callable[..., Any], *inputs: Any) -> Any:
        """Run any program over the model's weights."""
        return program(*inputs)

    def total(self, total: Tensor) -> Tensor:
        """Return the divisor of the loss of a micro-batch that rank 0 computes alone."""
        return total

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of what rank 0 computes alone, into each `.grad`."""
        loss.backward()

    def grads(self, loss: Tensor, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return gradients of what rank 0 computes alone, None for what the loss does not depend on."""
        return torch.autograd.grad(loss, wanted, allow_unused=True)

    def norm(self, norms: Tensor) -> Tensor:
        """Turn norms of what this rank holds into norms of the whole."""
        return norms

    def everywhere(self, flags: Sequence[bool]) -> Sequence[bool]:
        """Return the element-wise OR of flags over ranks."""
        return flags

    def not_finite(self, loss: float) -> tuple[float, set[int]]:
        """Return this rank's own loss of the last step, and the ids of parameters whose parts here were not finite.

        loss: of all ranks, for a session whose own way of accumulating never asked for it.
        """
        odd = [params for params, *ends in self._extremes if not all(bool(end.isfinite()) for end in ends)]
        own = loss if self._own_loss is None else self._own_loss.item()
        return own, {id(p) for params in odd for p in params}

    def most(self, found: Tensor) -> None:
        """Replace each element by the largest over all ranks."""
        self.on_sent("the amaxes of FP8" if self.sharded else "")
        dist.all_reduce(found, op=dist.ReduceOp.MAX)

    def together(self, loss: Tensor, nll: list[Tensor], shown: bool) -> tuple[Tensor, list[Tensor]]:
        """Sum the loss over all ranks; where it is `shown`, gather the per-token NLL in the batch's order."""
        self.on_sent("the sum of the losses" if self.sharded else "")
        self._own_loss = loss.clone()
        dist.all_reduce(loss)
        if shown:
            mine = torch.cat(nll)
            nll = [torch.empty_like(mine) for _ in range(self.count)]
            dist.all_gather(nll, mine)
        return loss, nll
