"""`watch_lightning`: check Lightning's automatic optimisation with a copy of the LightningModule's `training_step`.

    watcher = watch_lightning(every=100)
    trainer = L.Trainer(callbacks=[watcher])
    trainer.fit(module, loader)
    print(watcher)

Lightning runs forward and backward inside `optimizer.step(closure)`, and clips there. During training, the module's
`optimizer_step` is replaced on the instance by one that calls the original inside `watcher.step`. At
`on_before_optimizer_step`, gradients are complete and not yet clipped.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.core.errors import UserError
from lockstep.torch_backend.watch.adapters.library_watcher import LibraryWatcher, replace_on
from lockstep.torch_backend.watch.api import watch
from lockstep.torch_backend.watch.own_module import Accumulate, Loss


def watch_lightning(*, loss: Loss | None = None, accumulate: Accumulate = "mean", **settings: Any) -> LibraryWatcher:
    """Make a callback for `lightning.Trainer` that watches its runs.

    It uses the trainer's settings of accumulation, clipping by norm (`gradient_clip_val`) and bf16.

    Args:
        loss: `(module, batch) -> loss` of one micro-batch. Default: the module's `training_step`.
        accumulate: how a step's loss follows from its micro-batches, as in `watch`. Default: their mean.
        settings: other settings of `watch`; they override the trainer's.

    Raises UserError if Lightning is not installed. At the start of training, it raises UserError for settings that
    cannot work, and for a trainer that cannot be watched.
    """
    if settings.get("operations") and loss is None:
        raise UserError(
            "operations= runs the loss on your module once more, and training_step logs: give loss= as well"
        )
    try:
        from lightning.pytorch.callbacks import Callback
    except ModuleNotFoundError as error:
        raise UserError("watch_lightning needs lightning: pip install 'lockstep[lightning]'") from error

    class WatchLightning(Watched, Callback):
        """The watcher as a Lightning callback."""

    return WatchLightning(loss, accumulate, settings)


class Watched(LibraryWatcher):
    """The handlers of a run's events. Built by `watch_lightning`."""

    def __init__(self, loss: Loss | None, accumulate: Accumulate, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self._loss, self._accumulate, self._settings = loss, accumulate, settings
        self._parts: list[Any] = []
        self._total: Any = 0.0
        self._put_back: Callable[[], None] | None = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Build the watcher, because the optimizer exists now, and wrap the module's `optimizer_step`."""
        self._restore()
        _refuse(trainer, module)
        found = {
            "precision": "bf16" if trainer.precision.startswith("bf16") else None,
            "clip_norm": trainer.gradient_clip_val or None,
            "start": trainer.global_step,
        }
        self.watcher = watcher = watch(
            module,
            trainer.optimizers[0],
            loss=self._loss or own_loss,
            accumulate=self._accumulate,
            **(found | dict(self._settings)),
        )
        original = module.optimizer_step

        def optimizer_step(*args: Any, **kwargs: Any) -> None:
            with watcher.step(self._parts):
                original(*args, **kwargs)
            self._parts, self._total = [], 0.0

        self._put_back = replace_on(module, "optimizer_step", optimizer_step)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Keep the micro-batch."""
        self._parts.append((batch, batch_idx) if self._loss is None else batch)

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        """Add the loss to the step's total; Lightning has divided it by `accumulate_grad_batches`."""
        self._total = self._total + loss.detach()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Read the gradients before clipping."""
        if self.watcher is not None:
            self.watcher.in_closure(self._total)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Restore the module's own `optimizer_step`."""
        self._restore()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Restore the module's own `optimizer_step`."""
        self._restore()

    def _restore(self) -> None:
        self._parts, self._total = [], 0.0
        if self._put_back is not None:
            self._put_back()
        self._put_back = None


def own_loss(module: Any, part: tuple[Any, int]) -> Any:
    """Call the module's `training_step` with a micro-batch and its number; return its loss, a scalar tensor."""
    batch, number = part
    takes_number = len(inspect.signature(module.training_step).parameters) > 1
    with warnings.catch_warnings():
        # A copy of the module has no trainer. There, `self.log` has no effect except a warning.
        warnings.filterwarnings("ignore", message=r"You are trying to `self\.log")
        found = module.training_step(batch, number) if takes_number else module.training_step(batch)
    return found["loss"] if isinstance(found, Mapping) else found


def _refuse(trainer: Any, module: Any) -> None:
    """Raise UserError for a run that cannot be watched, with the reason."""
    if not module.automatic_optimization:
        raise UserError("with manual optimisation, use watch() around optimizer.step()")
    if trainer.world_size > 1:
        raise UserError("watch_lightning takes one process: watch(accumulate=) takes the batches of all ranks")
    if len(trainer.optimizers) != 1:
        raise UserError(f"watch_lightning takes one optimizer; this module has {len(trainer.optimizers)}")
    if trainer.precision.startswith("16"):
        raise UserError(
            "watch_lightning does not support fp16, whose gradients are scaled when they are read; use bf16"
        )
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        raise UserError("gradients clipped by value are not supported; clip by norm")
