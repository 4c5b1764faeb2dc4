"""A rank's step under FSDP2, with sharded weights (torch_backend/ranks/sharded_tensors.py).

Every rank must take part in every computation that needs the weights, also in those for rank 0 alone: the single
micro-batch of a check, validation, a sample. All ranks compute the same program. The loss of all ranks except rank 0 is
divided by infinity, so that their gradients are zero and the sum over ranks has the bits of rank 0's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.backend import Batch
from lockstep.torch_backend.programs import Programs
from lockstep.torch_backend.ranks.sharded_tensors import Gather, NotSummed, SumAndCut, parts, sum_of_squares
from lockstep.torch_backend.ranks.sharing import MicroLoss, Sharing
from lockstep.torch_backend.tools.step_timer import REDUCING


class ShardedRanks(Sharing):
    """The ranks under FSDP2; each holds a part of weights, gradients and moments."""

    sharded = True

    def __init__(self, session: Programs) -> None:
        super().__init__(session.step_timer, session.config.parallel)
        assert session.root is not None
        self.root: Any = session.root
        self._model, self._program = session.model, session.micro_loss
        self._parameters = list(session.parameters.values())
        self._each = session.config.parallel.reduce_every_micro_batch
        # True if several ranks contribute to the sum of gradients. If only rank 0 does, the sum is exact in any dtype.
        self._shared = False
        self._parts = parts(session.root)
        # The reduce-scatter of each part's gradients; `unreduced` replaces it for one pass.
        self._sums: dict[str, SumAndCut] = {}
        for name, part in self._parts.items():
            called = name.removeprefix("model.") or "embedding, final norm and head"
            members = [p for p in self._parameters if any(p is own for own in _own(part))]
            part.set_custom_all_gather(self.gather(called))
            self._sums[name] = self.sum_and_cut(called, members)
            part.set_custom_reduce_scatter(self._sums[name])
            # Compute a plain sum over ranks. By default torch divides by the number of ranks, in nccl's reduction.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    def gather(self, called: str) -> Gather:
        """Return the all-gather of a module's weights."""
        return Gather(lambda: self.on_sent(f"the all-gather of {called}"))

    def sum_and_cut(self, called: str, members: Sequence[Tensor]) -> SumAndCut:
        """Return the reduce-scatter of a module's gradients."""
        return SumAndCut(partial(self._noted, called, members), self.narrow)

    def narrow(self) -> torch.dtype | None:
        """Return the narrow dtype in which gradients are summed now; None if they are summed in their own dtype."""
        return self._narrow if self._shared else None

    def _noted(self, called: str, members: Sequence[Tensor], gradients: Tensor) -> None:
        self.on_sent(f"the reduce-scatter of {called}")
        # Every part updates the mark. The time after the last one is that of the wait for other ranks.
        self._step_timer.mark(REDUCING)
        self.calls += 1
        self._extremes.append((members, *torch.aminmax(gradients)))

    def plan(self, micros: Sequence[Batch]) -> Iterator[MicroLoss]:
        """Yield the program for each of this rank's micro-batches, in order.

        Whole gradients accumulate on the rank, and the last backward pass reduces their sum, as under DDP. With
        `parallel.reduce_every_micro_batch`, each backward pass reduces its gradients, and the sharded parts accumulate.
        """
        self._shared = self.shares(micros)
        count = len(self.own(micros))
        if not self._shared:
            self.root.set_requires_gradient_sync(True)
            yield from (self.alone for _ in range(count))
            return
        self._extremes.clear()
        for number in range(1, count + 1):
            self.root.set_requires_gradient_sync(self._each or number == count)
            yield self.trains

    def trains(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the micro-batch's loss and NLL."""
        found: tuple[Tensor, Tensor] = self.run(self._program, *inputs)
        return found

    def alone(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the micro-batch's loss and NLL; only the loss of rank 0 contributes to gradients."""
        tokens, targets, weights, total, *documents = inputs
        return self.trains(tokens, targets, weights, self.total(total), *documents)

    def total(self, total: Tensor) -> Tensor:
        """Return `total` on rank 0, and infinity on all other ranks."""
        return total if self.rank == 0 else torch.full_like(total, torch.inf)

    def run(self, program: Callable[..., Any], *inputs: Any) -> Any:
        """Call `program(*inputs)` while the root's weights are gathered."""
        try:
            return self.root(partial(program, *inputs))
        finally:
            if not torch.is_grad_enabled():
                # No backward pass frees the gathered weights here, and a later call would use outdated ones.
                self.root.reshard()

    def backward(self, loss: Tensor) -> None:
        """Compute this rank's parts of the gradients of rank 0's loss, and store them in `.grad`."""
        self.root.set_requires_gradient_sync(True)
        self._shared = False
        loss.backward()

    def grads(self, loss: Tensor, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the gradients of `wanted`; for a parameter, this rank's part.

        It runs a backward pass instead of torch.autograd.grad, because autograd's graph has the gathered weights.
        """
        self.backward(loss)
        found = [t.grad for t in wanted]
        for tensor in (*wanted, *self._parameters):
            tensor.grad = None
        return found

    def unreduced(self, take: Callable[[Tensor, Tensor], None], program: Callable[..., Any], *inputs: Any) -> None:
        """Call `take` with each parameter and its whole gradient from this rank's micro-batch, before any reduction.

        `take` receives the gradients of a part after the backward pass of that part; they are freed afterwards.
        """
        self.root.set_requires_gradient_sync(True)
        for part in self._parts.values():
            part.set_custom_reduce_scatter(NotSummed(_own(part), take))
        try:
            self.root(partial(program, *inputs))[0].backward()
        finally:
            for name, part in self._parts.items():
                part.set_custom_reduce_scatter(self._sums[name])
            for p in self._parameters:
                p.grad = None

    def norm(self, norms: Tensor) -> Tensor:
        """Return the square root of the sum over ranks of the squared norms."""
        self.on_sent("the sum of the norms")
        return sum_of_squares(norms)

    def everywhere(self, flags: Sequence[bool]) -> Sequence[bool]:
        """Return the element-wise OR of flags over ranks."""
        found = torch.tensor(flags, dtype=torch.int64, device=self._parameters[0].device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in found]


def _own(part: Any) -> list[Tensor]:
    """List the parameters of a part that do not belong to a part inside it."""
    inner = {id(p) for other in parts(part).values() if other is not part for p in other.parameters()}  # type: ignore[attr-defined]
    return [p for p in part.parameters() if id(p) not in inner]
