"""`watch_accelerate`: a user's own loop with accelerate's `Accelerator`, with or without gradient accumulation.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watcher = watch_accelerate(accelerator, model, optimizer, loss=my_loss, every=100)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = my_loss(model, batch)
            accelerator.backward(loss)
            with watcher.step(batch, loss):
                optimizer.step()
            optimizer.zero_grad()

accelerate's optimizer skips `step` while gradients accumulate. `watcher.step` collects micro-batches until the update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.core.errors import UserError
from lockstep.core.parity.watch.api import Watcher
from lockstep.torch_backend.watch.adapters.library_watcher import LibraryWatcher
from lockstep.torch_backend.watch.api import watch
from lockstep.torch_backend.watch.own_module import Accumulate, Loss


def watch_accelerate(
    accelerator: Any, model: Any, optimizer: Any, *, loss: Loss, accumulate: Accumulate = "mean", **settings: Any
) -> AccelerateWatcher:
    """Watch a model and an optimizer of `accelerator.prepare`, with gradients from `accelerator.backward`.

    Args:
        accelerator: an Accelerator of one process, or of several under DistributedDataParallel. Its bf16 setting is
            used.
        model: the prepared model.
        optimizer: the prepared optimizer.
        loss: `(model, batch) -> loss` of one micro-batch, as in `watch`.
        accumulate: how a step's loss follows from the micro-batches of all processes, as in `watch`. Default: their
            mean.
        settings: other settings of `watch`.

    Raises UserError for settings that cannot work.
    """
    if not replicates(accelerator):
        kind = accelerator.distributed_type.value
        raise UserError(f"watch_accelerate takes one process, or several under DistributedDataParallel; not {kind}")
    if accelerator.scaler is not None:
        raise UserError(
            "watch_accelerate does not support fp16, whose gradients are scaled when they are read; use bf16"
        )
    found = {"precision": "bf16" if accelerator.mixed_precision == "bf16" else None}
    return AccelerateWatcher(
        accelerator,
        watch(model, optimizer, loss=loss, accumulate=accumulate, **(found | {"ranks": "gather"} | settings)),
    )


def replicates(accelerator: Any) -> bool:
    """Return whether an Accelerator has one process, or wraps its model in DistributedDataParallel."""
    kind = str(accelerator.distributed_type.value)
    return accelerator.num_processes == 1 or kind.startswith("MULTI_")


class AccelerateWatcher(LibraryWatcher):
    """A watcher that collects micro-batches into steps. Built by `watch_accelerate`."""

    def __init__(self, accelerator: Any, watcher: Watcher) -> None:
        super().__init__(watcher)
        self._step, self._accelerator = watcher.step, accelerator
        self._parts: list[tuple[Any, Any]] = []

    @contextmanager
    def step(self, batch: Any, loss: Any = None) -> Iterator[None]:
        """Enclose clipping and `optimizer.step()`, after every `accelerator.backward(loss)`.

        Args:
            batch: the micro-batch.
            loss: the argument of `accelerator.backward`, before its division by `gradient_accumulation_steps`.

        Raises Disagreed under `on_alarm="stop"`, as `Watcher.step` does.
        """
        self._parts.append((batch, loss.detach() if hasattr(loss, "detach") else loss))
        if not self._accelerator.sync_gradients:
            yield
            return
        parts, self._parts = self._parts, []
        losses = [loss for _, loss in parts if loss is not None]
        total = sum(losses) / self._accelerator.gradient_accumulation_steps if len(losses) == len(parts) else None
        with self._step([part for part, _ in parts], total):
            yield
