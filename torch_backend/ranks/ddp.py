"""A rank's step under DistributedDataParallel: DDP wraps the compiled program and sums gradients over ranks.

For sharded weights see torch_backend/ranks/fsdp.py.

The order is DDP(torch.compile(module, fullgraph=True)). The reverse, torch.compile(DDP(module), fullgraph=True), fails,
because DDP's forward is not one graph. Dynamo detects that DDP calls the program, and splits the graph at the borders
of DDP's buckets (torch/_dynamo/backends/distributed.py), so that the all-reduce of a bucket overlaps with the rest of
the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from lockstep.core.backend import Batch
from lockstep.core.config.schema import RunConfig
from lockstep.torch_backend.programs import Programs
from lockstep.torch_backend.ranks.sharing import MicroLoss, Sharing
from lockstep.torch_backend.tools.step_timer import REDUCING


class Ranks(Sharing):
    """The ranks under DDP; each holds all weights. A session class may override `build_ranks` to use another class."""

    def __init__(self, session: Programs) -> None:
        super().__init__(session.step_timer, session.config.parallel)
        self._arranged = False
        # Gradients in DDP's buckets, by the parameter's id, and the number of backward passes that reduced them.
        self._in_buckets: dict[int, Tensor] = {}
        self._sums = 0
        module = _MicroLoss(session.model, session.micro_loss)
        compile = session.config.compile
        # With scope "blocks", the blocks are already compiled.
        whole = compile.enabled and compile.scope == "model"
        program: nn.Module = session.compiled(module) if whole else module
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(program, self.left_out(program))
        self.ddp = DistributedDataParallel(
            program, bucket_cap_mb=session.config.parallel.bucket_mb, gradient_as_bucket_view=True
        )
        # A lambda, because DDP compares annotations with its own classes, and the annotations of `self.sum` are text.
        self.ddp.register_comm_hook(None, lambda _, bucket: self._noted_and_summed(bucket))

    def left_out(self, program: nn.Module) -> list[str]:
        """Return the names that DDP ignores: buffers, which are tables with the same values on every rank."""
        return [name for name, _ in program.named_buffers()]

    def arrange(self, micros: Sequence[Batch], backward: Callable[[MicroLoss], object]) -> None:
        """Run one backward pass before the first step that several ranks share, and discard its gradients.

        After its first backward pass DDP rebuilds its buckets (torch/csrc/distributed/c10d/reducer.cpp,
        `rebuild_buckets`). With more than two ranks, the place of a gradient in a bucket determines the order of its
        sum. Without this pass, the first step after a resume would round differently from the same step of an
        uninterrupted run. After this pass, gradients accumulate in the buckets (`clear`).
        """
        if self._arranged or not self.shares(micros):
            return
        backward(self.ddp)
        self.reduced(p for p in self.ddp.parameters() if p.requires_grad)
        self.calls, self._arranged = 0, True

    def clear(self, parameters: Sequence[Tensor]) -> None:
        """Zero the gradients in DDP's buckets before a step, so that gradients accumulate there.

        Otherwise micro-batches before the last one would allocate a second set of gradients, of the size of all
        weights.
        """
        for p in parameters:
            p.grad = self._in_buckets.get(id(p), p.grad)
        if self._sums < 2:
            # DDP rebuilds its buckets before its second reduction. Drop the references to the old ones to free them.
            self._in_buckets.clear()
        if there := [p.grad for p in parameters if p.grad is not None]:
            torch._foreach_zero_(there)

    def reduced(self, parameters: Iterable[Tensor]) -> None:
        """Record the gradients after a reduction: they are views of the buckets (`gradient_as_bucket_view`)."""
        self._sums += 1
        self._in_buckets = {id(p): p.grad for p in parameters if p.grad is not None}

    def plan(self, micros: Sequence[Batch]) -> Iterator[MicroLoss]:
        """Yield the program for each of this rank's micro-batches, in order.

        Gradients accumulate on the rank; the last backward pass reduces their sum over ranks.
        """
        count = len(self.own(micros))
        if not self.shares(micros):
            yield from (self.alone for _ in range(count))
            return
        self._extremes.clear()
        for number in range(1, count + 1):
            yield self.ddp if number == count else self.unreduced

    def unreduced(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the micro-batch's loss and NLL; its backward pass does not reduce gradients over ranks."""
        with self.ddp.no_sync():
            return self.ddp(*inputs)

    def alone(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Run the same program without communication in the forward and the backward pass."""
        # The call has DDP's context: without it, the first call would compile another program than that of training.
        with self.ddp._inside_ddp_forward():
            return self.ddp.module(*inputs)

    def _noted_and_summed(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        # Keep the extremes before the sum, after which the source of a value that is not finite cannot be found.
        self.on_sent("")
        # Every bucket updates the mark. The time after the last one is that of the wait for other ranks.
        self._step_timer.mark(REDUCING)
        self._extremes.append((bucket.parameters(), *torch.aminmax(bucket.buffer())))
        return self.sum(bucket)

    def sum(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Sum the bucket over ranks in the configured dtype; the future's value is the bucket's buffer.

        The result is a sum and not a mean, because the loss is already divided by the weight of all ranks' tokens.
        torch's own bf16_compress_hook computes a mean.
        """
        self.calls += 1
        buffer = bucket.buffer()
        sent = buffer if self._narrow is None else buffer.to(self._narrow)
        work = dist.all_reduce(sent, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: buffer if sent is buffer else buffer.copy_(done.value()[0]))


class _MicroLoss(nn.Module):
    """`Programs.micro_loss` as a module, because DDP wraps modules."""

    def __init__(self, model: nn.Module, micro_loss: MicroLoss) -> None:
        super().__init__()
        self.model = model
        self.micro_loss = micro_loss

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        return self.micro_loss(*inputs)


def in_force(config: RunConfig, device: str) -> dict[str, str]:
    """Describe how ranks reduce gradients, for the table at start; {} for one rank."""
    if config.train.ranks == 1:
        return {}
    parallel, group = config.parallel, "nccl" if device == "cuda" else "gloo"
    summed = f"gradients summed in {parallel.gradient_dtype}"
    if parallel.strategy == "ddp":
        return {"ranks": f"{config.train.ranks}, DDP over {group}: {summed}, buckets of {parallel.bucket_mb} MB"}
    freed = "freed between the passes" if parallel.reshard_after_forward else "kept between the passes"
    return {"ranks": f"{config.train.ranks}, FSDP2 over {group}: weights, gradients, moments cut; {freed}; {summed}"}
