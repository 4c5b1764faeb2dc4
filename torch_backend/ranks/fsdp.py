"""The part of a rank in a step when the weights are sharded over ranks (torch_backend/ranks/sharded_tensors.py).

Every rank must take part in whatever needs the weights, also in what rank 0 alone is asked for: a check's single
micro-batch, validation, a sample. All compute it then, and the loss of all but rank 0 is divided by infinity, so that
their gradients are zero and the sum over ranks has the bits of rank 0's.
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
    """The ranks under FSDP2, each with a part of weights, gradients and moments."""

    sharded = True

    def __init__(self, session: Programs) -> None:
        super().__init__(session.step_timer, session.config.parallel)
        assert session.root is not None
        self.root: Any = session.root
        self._model, self._program = session.model, session.micro_loss
        self._parameters = list(session.parameters.values())
        self._each = session.config.parallel.reduce_every_micro_batch
        # A sum to which only rank 0 contributes adds zeros: it is no reduction, and nothing rounds it.
        self._shared = False
        self._parts = parts(session.root)
        # The collective that sums the gradients of each part; observing unsummed ones replaces it.
        self._sums: dict[str, SumAndCut] = {}
        for name, part in self._parts.items():
            called = name.removeprefix("model.") or "embedding, final norm and head"
            members = [p for p in self._parameters if any(p is own for own in _own(part))]
            part.set_custom_all_gather(self.gather(called))
            self._sums[name] = self.sum_and_cut(called, members)
            part.set_custom_reduce_scatter(self._sums[name])
            # The sum over ranks has the factor 1. By default torch takes a mean, and nccl a product with its factor.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    def gather(self, called: str) -> Gather:
        """Return the function that gathers a module's weights."""
        return Gather(lambda: self.on_sent(f"the all-gather of {called}"))

    def sum_and_cut(self, called: str, members: Sequence[Tensor]) -> SumAndCut:
        """Return the function that sums a module's gradients over ranks."""
        return SumAndCut(partial(self._noted, called, members), self.narrow)

    def narrow(self) -> torch.dtype | None:
        """Return the dtype that gradients are summed in now, if it is a narrow one."""
        return self._narrow if self._shared else None

    def _noted(self, called: str, members: Sequence[Tensor], gradients: Tensor) -> None:
        self.on_sent(f"the reduce-scatter of {called}")
        # Updated by every part: the time after the last one is spent waiting for the other ranks.
        self._step_timer.mark(REDUCING)
        self.calls += 1
        self._extremes.append((members, *torch.aminmax(gradients)))

    def plan(self, micros: Sequence[Batch]) -> Iterator[MicroLoss]:
        """Yield the program for each micro-batch that this rank computes of these, in order.

        Whole gradients accumulate on the rank and the last backward pass reduces their sum, as under DDP; or each one
        reduces its own, if so configured, and parts accumulate.
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
        """Return the micro-batch's loss and NLL; only the loss of rank 0 counts."""
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
                # No backward pass will free the gathered weights, and the next call would use them after they are
                # outdated.
                self.root.reshard()

    def backward(self, loss: Tensor) -> None:
        """Compute this rank's parts of the gradients of rank 0's loss, into each `.grad`."""
        self.root.set_requires_gradient_sync(True)
        self._shared = False
        loss.backward()

    def grads(self, loss: Tensor, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return gradients, for parameters this rank's parts, by a backward pass: autograd sees gathered weights."""
        self.backward(loss)
        found = [t.grad for t in wanted]
        for tensor in (*wanted, *self._parameters):
            tensor.grad = None
        return found

    def unreduced(self, take: Callable[[Tensor, Tensor], None], program: Callable[..., Any], *inputs: Any) -> None:
        """Hand `take` each parameter and the whole gradient of this rank's own micro-batch, before any sum.

        A part's gradients come when its backward pass is done, and go when they are taken.
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
        """Return the root of the sum of squares over ranks."""
        self.on_sent("the sum of the norms")
        return sum_of_squares(norms)

    def everywhere(self, flags: Sequence[bool]) -> Sequence[bool]:
        """Return whether something is so on any rank."""
        found = torch.tensor(flags, dtype=torch.int64, device=self._parameters[0].device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in found]


def _own(part: Any) -> list[Tensor]:
    """List the parameters of a part that belong to no part inside it."""
    inner = {id(p) for other in parts(part).values() if other is not part for p in other.parameters()}  # type: ignore[attr-defined]
    return [p for p in part.parameters() if id(p) not in inner]
