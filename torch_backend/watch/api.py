"""`watch`: check a user's training loop with a copy of the user's module, or with a function of the user.

    watcher = watch(model, optimizer, loss=fn)
    for batch in data:
        loss = fn(model, batch)
        loss.backward()
        with watcher.step(batch, loss):
            optimizer.step()
        optimizer.zero_grad()

The checks are in core/parity/watch/. docs/guide/watch.md is the page for users.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.core.errors import UserError
from lockstep.core.parity.watch import api, fused_kernels
from lockstep.core.parity.watch.api import Watcher
from lockstep.torch_backend.optim import fused_adam_in_fp32
from lockstep.torch_backend.watch.module_copy import unwrapped
from lockstep.torch_backend.watch.operations import COUNT
from lockstep.torch_backend.watch.own_module import Accumulate, Loss, OwnModule
from lockstep.torch_backend.watch.ranks import How, ranks_that_train
from lockstep.torch_backend.watch.sharded_module import shards


def _adam_in_fp32(parameter: Any) -> bool:
    return isinstance(parameter, torch.Tensor) and fused_adam_in_fp32(parameter.device)


fused_kernels.offer(_adam_in_fp32)


def watch(
    model: Any,
    optimizer: Any,
    *,
    loss: Loss | None = None,
    reference: Any = None,
    accumulate: Accumulate = None,
    ranks: How | None = None,
    operations: bool | int = False,
    **settings: Any,
) -> Watcher:
    """Watch `model` (any torch module) and `optimizer` (one, or a sequence of them); return the watcher.

    Args:
        model: the model in training, with its wrappers: torch.compile, DistributedDataParallel, fully_shard (FSDP2),
            accelerate.
        optimizer: the optimizer. Its hyperparameters and its state are read before and after its step.
        loss: `(model, batch) -> loss`, a scalar tensor, or `-> (loss, outputs)`. It is called with copies of the module
            on the CPU: one in FP64 for the truth, one in the training dtypes for the twin.
        reference: an independent function that replaces `loss`, as in core/parity/watch/api.py.
        accumulate: with `loss`, for steps that accumulate gradients. `step` then takes the list of micro-batches. The
            step's loss is their mean (`mean`), their sum (`sum`), or their sum with the weights that a function of the
            list returns. With several ranks, the list has the micro-batches of all ranks, in the order of ranks.
        ranks: with `loss`, for a model that several ranks train. `gather`: every rank has a watcher and calls `step`
            with its own batch and loss, and there is one verdict for all ranks. `given`: `step` takes the batches of
            all ranks, and each rank judges for itself. Default: `gather` for FSDP2 and without `accumulate`.
        operations: with `loss`, also judge single operations of forward and backward, each from its own inputs: True
            for 200 per check, or the number per check. The loss runs again on the module itself; with `gather`, on
            rank 0 only. Not supported for FSDP2.
        settings: the other settings, as in core/parity/watch/api.py.

    Raises UserError for settings that cannot work.
    """
    if (loss is None) == (reference is None):
        raise UserError("watch needs either loss=, a function of the model and a batch, or reference=")
    count = _count(operations)
    sharded = shards(unwrapped(model)) if isinstance(model, nn.Module) else False
    if sharded and count:
        raise UserError("operations= needs whole weights on every rank, and these are sharded")
    if reference is not None:
        if count:
            raise UserError("operations= needs loss=: it runs your loss on your module once more")
        if accumulate is not None or ranks is not None:
            given = "accumulate=" if accumulate is not None else "ranks="
            raise UserError(f"{given} needs loss=: a reference defines the form of a step's batches itself")
        together = ranks_that_train(model, gathers=False) if sharded else None
        return api.watch(model, optimizer, reference=reference, together=together, **settings)
    if not callable(loss):
        raise UserError(f"loss={loss!r}: it is a function of the model and a batch")
    if not (accumulate in (None, "mean", "sum") or callable(accumulate)):
        raise UserError(f"accumulate={accumulate!r}: it is 'mean', 'sum' or a function of the list of micro-batches")
    if ranks not in (None, "gather", "given"):
        raise UserError(f"ranks={ranks!r}: it is 'gather' or 'given'")
    if settings.get("names"):
        raise UserError("names= needs reference=: with loss=, a copy of the module has the same names")
    if sharded and ranks == "given":
        raise UserError("ranks='given' needs whole weights on every rank, and these are sharded")
    own = OwnModule(model, loss, accumulate, count)
    if own.casts and settings.get("precision") is None:
        settings["precision"] = "bf16"
    gathers = ranks == "gather" or (ranks is None and (sharded or accumulate is None))
    together = ranks_that_train(model, gathers=True) if gathers else None
    own.divisor = together.divisor if together else 1.0
    return api.watch(model, optimizer, reference=own, together=together, **settings)


def _count(operations: bool | int) -> int:
    """Return the number of operations that a check judges. Raises UserError for an invalid value."""
    if isinstance(operations, bool):
        return COUNT if operations else 0
    if isinstance(operations, int) and operations > 0:
        return operations
    raise UserError(f"operations={operations!r}: it is True, False, or how many operations a check judges")
