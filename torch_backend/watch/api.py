"""`watch`: somebody's own training loop against a copy of their own module, or against a function of theirs.

    watcher = watch(model, optimizer, loss=fn)
    for batch in data:
        loss = fn(model, batch)
        loss.backward()
        with watcher.step(batch, loss):
            optimizer.step()
        optimizer.zero_grad()

The checks themselves are core/parity/watch/. docs/guide/watch.md is the page for users.
"""

from __future__ import annotations

from typing import Any

from lockstep.core.errors import UserError
from lockstep.core.parity.watch import api
from lockstep.core.parity.watch.api import Watcher
from lockstep.torch_backend.watch.own_module import Accumulate, Loss, OwnModule


def watch(
    model: Any,
    optimizer: Any,
    *,
    loss: Loss | None = None,
    reference: Any = None,
    accumulate: Accumulate = None,
    **settings: Any,
) -> Watcher:
    """A watcher of `model` (any torch module) and `optimizer` (one, or a sequence of them).

    Args:
        model: what trains, wrapped as it is: torch.compile, DistributedDataParallel, accelerate.
        optimizer: its groups' hyperparameters and its state are read around its step.
        loss: `(model, batch) -> loss`, a scalar tensor, or `(loss, outputs)`. It is called with a copy of the module,
            on the CPU: in FP64 for the truth, as the module trains for the twin.
        reference: in place of `loss`: an independent function, as core/parity/watch/api.py takes it.
        accumulate: with `loss`, for steps that accumulate gradients: `step` gets the list of micro-batches, and the
            step's loss is their mean (`mean`), their sum (`sum`) or their sum with the weights that a function of the
            list returns.
        settings: all others, as core/parity/watch/api.py has them.

    Raises UserError for settings that cannot work.
    """
    if (loss is None) == (reference is None):
        raise UserError("watch takes loss=, a function of the model and a batch, or reference=: one of them")
    if reference is not None:
        if accumulate is not None:
            raise UserError("accumulate= goes with loss=: a reference gets the batches of a step as it wants them")
        return api.watch(model, optimizer, reference=reference, **settings)
    if not callable(loss):
        raise UserError(f"loss={loss!r}: it is a function of the model and a batch")
    if not (accumulate in (None, "mean", "sum") or callable(accumulate)):
        raise UserError(f"accumulate={accumulate!r}: it is 'mean', 'sum' or a function of the list of micro-batches")
    if settings.get("names"):
        raise UserError("names= goes with reference=: a copy of the module has the module's names")
    return api.watch(model, optimizer, reference=OwnModule(model, loss, accumulate), **settings)
