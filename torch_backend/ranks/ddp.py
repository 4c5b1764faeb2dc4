"""The part of a rank in a step: DistributedDataParallel around the compiled program, gradients summed over ranks.

Where the weights themselves are cut over ranks: torch_backend/ranks/fsdp.py.

The order is DDP(torch.compile(module, fullgraph=True)). The other one, torch.compile(DDP(module), fullgraph=True),
fails: DDP's forward is not one graph. Dynamo sees that DDP calls the program and cuts the graph, captured whole, at
DDP's buckets (torch/_dynamo/backends/distributed.py), so that a bucket is on its way while the backward pass of the
others goes on.
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
    """The ranks under DDP, each with whole weights. A subclass of TorchSession makes other ranks by `build_ranks`."""

    def __init__(self, session: Programs) -> None:
        super().__init__(session.step_timer, session.config.parallel)
        self._arranged = False
        # Gradients in DDP's buckets, by the parameter's id; and the number of backward passes that summed them.
        self._in_buckets: dict[int, Tensor] = {}
        self._sums = 0
        module = _MicroLoss(session.model, session.micro_loss)
        compile = session.config.compile
        # With scope "blocks", each block is compiled already.
        whole = compile.enabled and compile.scope == "model"
        program: nn.Module = session.compiled(module) if whole else module
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(program, self.left_out(program))
        self.ddp = DistributedDataParallel(
            program, bucket_cap_mb=session.config.parallel.bucket_mb, gradient_as_bucket_view=True
        )
        # Not `self.sum` itself: DDP compares annotations, which are text here, with its own classes.
        self.ddp.register_comm_hook(None, lambda _, bucket: self._noted_and_summed(bucket))

    def left_out(self, program: nn.Module) -> list[str]:
        """Return names of what DDP leaves alone: buffers are tables, the same on every rank."""
        return [name for name, _ in program.named_buffers()]

    def arrange(self, micros: Sequence[Batch], backward: Callable[[MicroLoss], object]) -> None:
        """Run a backward pass that does not count, before the first step of several ranks; discard its gradients.

        DDP lays its buckets anew after its first one (torch/csrc/distributed/c10d/reducer.cpp, `rebuild_buckets`), and
        a gradient's place in a bucket sets the order in which more than two ranks are summed: without this pass, the
        first step after a resume would round otherwise than the same step of a run that was not stopped. And from it on
        gradients are added up in the buckets (`clear`).
        """
        if self._arranged or not self.shares(micros):
            return
        backward(self.ddp)
        self.reduced(p for p in self.ddp.parameters() if p.requires_grad)
        self.calls, self._arranged = 0, True

    def clear(self, parameters: Sequence[Tensor]) -> None:
        """Zero the gradients in DDP's buckets before a step, so that they are added up there.

        Otherwise a micro-batch that is not reduced makes gradients of its own, as large as all weights, beside the
        buckets.
        """
        for p in parameters:
            p.grad = self._in_buckets.get(id(p), p.grad)
        if self._sums < 2:
            # DDP rebuilds its buckets before its second sum, and the old ones are to be freed.
            self._in_buckets.clear()
        if there := [p.grad for p in parameters if p.grad is not None]:
            torch._foreach_zero_(there)

    def reduced(self, parameters: Iterable[Tensor]) -> None:
        """Note the gradients after their sum over ranks: they lie in the buckets (`gradient_as_bucket_view`)."""
        self._sums += 1
        self._in_buckets = {id(p): p.grad for p in parameters if p.grad is not None}

    def plan(self, micros: Sequence[Batch]) -> Iterator[MicroLoss]:
        """Yield the program for each micro-batch that this rank computes of these, in order.

        Gradients accumulate on the rank; the last backward pass reduces the sum.
        """
        count = len(self.own(micros))
        if not self.shares(micros):
            yield from (self.alone for _ in range(count))
            return
        self._extremes.clear()
        for number in range(1, count + 1):
            yield self.ddp if number == count else self.unreduced

    def unreduced(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the micro-batch's loss and NLL; its backward pass leaves the gradients on this rank."""
        with self.ddp.no_sync():
            return self.ddp(*inputs)

    def alone(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Run the same program without the other ranks: no communication in the forward or the backward pass."""
        # Called as DDP calls it: otherwise the first call outside would compile another program than training's.
        with self.ddp._inside_ddp_forward():
            return self.ddp.module(*inputs)

    def _noted_and_summed(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        # After the sum, no rank can find the source. One pass over the gradients, read only if a value is not finite.
        self.on_sent("")
        # Updated by every bucket: the time after the last one is spent waiting for the other ranks.
        self._step_timer.mark(REDUCING)
        self._extremes.append((bucket.parameters(), *torch.aminmax(bucket.buffer())))
        return self.sum(bucket)

    def sum(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Sum the bucket over ranks (no mean: the loss is divided by the weight of all ranks' tokens already).

        In the declared dtype: cast, summed, cast back. torch's own bf16_compress_hook takes the mean.
        """
        self.calls += 1
        buffer = bucket.buffer()
        sent = buffer if self._narrow is None else buffer.to(self._narrow)
        work = dist.all_reduce(sent, async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: buffer if sent is buffer else buffer.copy_(done.value()[0]))


class _MicroLoss(nn.Module):
    """`Programs.micro_loss` as a module, since DDP wraps modules."""

    def __init__(self, model: nn.Module, micro_loss: MicroLoss) -> None:
        super().__init__()
        self.model = model
        self.micro_loss = micro_loss

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        return self.micro_loss(*inputs)


def in_force(config: RunConfig, device: str) -> dict[str, str]:
    """Describe how ranks reduce, for the table at start; nothing for one rank."""
    if config.train.ranks == 1:
        return {}
    parallel, group = config.parallel, "nccl" if device == "cuda" else "gloo"
    summed = f"gradients summed in {parallel.gradient_dtype}"
    if parallel.strategy == "ddp":
        return {"ranks": f"{config.train.ranks}, DDP over {group}: {summed}, buckets of {parallel.bucket_mb} MB"}
    freed = "freed between the passes" if parallel.reshard_after_forward else "kept between the passes"
    return {"ranks": f"{config.train.ranks}, FSDP2 over {group}: weights, gradients, moments cut; {freed}; {summed}"}
