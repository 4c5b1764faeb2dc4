"""`watch_trainer`: check transformers' `Trainer` with a copy of its module, and a loss that is defined here.

    trainer = Trainer(model, args, train_dataset=data)
    watcher = watch_trainer(trainer, every=100)
    trainer.train()
    print(watcher)

A callback of the Trainer receives neither micro-batches nor gradients before clipping. Therefore, during training,
`training_step` is replaced on the instance by one that keeps its arguments and calls the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.core.errors import UserError
from lockstep.torch_backend.watch.adapters.accelerate import replicates
from lockstep.torch_backend.watch.adapters.library_watcher import LibraryWatcher, replace_on
from lockstep.torch_backend.watch.api import watch
from lockstep.torch_backend.watch.own_module import Accumulate, Loss

# The value of a label that is not a target (transformers' convention, and the default of torch's cross_entropy).
NO_TARGET = -100
ADAMW = ("adamw_torch", "adamw_torch_fused")


def watch_trainer(
    trainer: Any, *, loss: Loss | None = None, accumulate: Accumulate = None, **settings: Any
) -> LibraryWatcher:
    """Watch the runs of a `transformers.Trainer`, beginning with the next `train()`.

    It uses the trainer's clipping (`max_grad_norm`), bf16 autocast, and the hyperparameters and schedule in the
    trainer's arguments. The default loss of a step is for causal language models: the sum of the cross-entropies of the
    micro-batches of all processes, divided by their number of targets. Targets are labels that follow a token and are
    not -100.

    Args:
        trainer: a trainer of one process and one device, or of several processes under DistributedDataParallel.
        loss: `(model, inputs) -> loss` of one micro-batch.
        accumulate: with `loss`, how a step's loss follows from its micro-batches, as in `watch`. Default: their mean.
        settings: other settings of `watch`; they override the trainer's.

    Raises UserError for a trainer that cannot be watched, and, when training begins, for settings that cannot work.
    """
    from transformers import TrainerCallback

    _refuse(trainer, loss)
    if loss is None:
        if accumulate is not None:
            raise UserError("accumulate= needs loss=: the default loss counts the targets of its micro-batches")
        loss, accumulate = token_losses, one_over_targets
    watched = Watched(trainer, loss, accumulate or "mean", settings)

    class Watching(TrainerCallback):
        """A callback that passes the trainer's events to the watcher."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watched.begin()

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watched.parts.clear()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watched.stepped()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watched.restore()

    trainer.add_callback(Watching())
    return watched


class Watched(LibraryWatcher):
    """The watcher of a trainer. Built by `watch_trainer`.

    parts: each micro-batch of the step so far, with its loss.
    """

    def __init__(self, trainer: Any, loss: Loss, accumulate: Accumulate, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.parts: list[tuple[dict[str, Any], Any]] = []
        self._trainer, self._loss, self._accumulate, self._settings = trainer, loss, accumulate, settings
        self._made_by_trainer = trainer.optimizer is None
        self._put_back: Callable[[], None] | None = None

    def begin(self) -> None:
        """Build the watcher, because the optimizer exists now, and wrap `training_step`."""
        self.restore()
        trainer, args = self._trainer, self._trainer.args
        found = {
            "precision": "bf16" if args.bf16 else None,
            "clip_norm": args.max_grad_norm if args.max_grad_norm > 0 else None,
            "declared": declared_by(trainer) if self._made_by_trainer else None,
            "start": trainer.state.global_step,
            "ranks": "gather",
        }
        self.watcher = watch(
            trainer.model_wrapped if args.world_size > 1 else trainer.model,
            trainer.optimizer,
            loss=self._loss,
            accumulate=self._accumulate,
            **(found | dict(self._settings)),
        )
        original = trainer.training_step

        def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            given = dict(inputs)
            value = original(model, inputs, *args, **kwargs)
            self.parts.append((given, value))
            if trainer.accelerator.sync_gradients and self.watcher is not None:
                self.watcher.before_step([part for part, _ in self.parts], sum(value for _, value in self.parts))
            return value

        self._put_back = replace_on(trainer, "training_step", training_step)

    def stepped(self) -> None:
        """Judge the step, if it is one to check."""
        assert self.watcher is not None
        try:
            self.watcher.after_step()
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Restore the trainer's own `training_step`."""
        if self._put_back is not None:
            self._put_back()
        self._put_back = None


def token_losses(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """Sum the cross-entropies of a micro-batch: logits (rows, length, vocabulary) and the tokens that follow."""
    given = {key: value for key, value in inputs.items() if key not in ("labels", "shift_labels")}
    logits: Tensor = model(**given).logits
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    targets = targets_of(inputs)
    return F.cross_entropy(
        logits[:, : targets.shape[1]].flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum"
    )


def targets_of(inputs: Mapping[str, Any]) -> Tensor:
    """Return the targets: (rows, length − 1), or (rows, length) if the collator has shifted the labels."""
    if "shift_labels" in inputs:
        return inputs["shift_labels"]
    return inputs["labels"][:, 1:]


def one_over_targets(parts: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return a weight for each micro-batch's sum: 1 / the number of targets of the whole step."""
    count = sum(int((targets_of(part) != NO_TARGET).sum()) for part in parts)
    return [1.0 / count if count else 0.0] * len(parts)


def declared_by(trainer: Any) -> Callable[[str, int], dict[str, Any]]:
    """Return a function from (parameter, step) to the hyperparameters that the trainer's arguments declare.

    It has a learning rate if the schedule is a function of the step. Weight decay applies to the parameters that the
    trainer lists.
    """
    args, scheduler = trainer.args, trainer.lr_scheduler
    scheduler = getattr(scheduler, "scheduler", scheduler)
    decayed = set(trainer.get_decay_parameter_names(trainer.model))

    def declared(name: str, step: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if type(scheduler) is torch.optim.lr_scheduler.LambdaLR:
            found["lr"] = args.learning_rate * scheduler.lr_lambdas[0](step - 1)
        if args.optim in ADAMW:
            found |= {
                "betas": (args.adam_beta1, args.adam_beta2),
                "eps": args.adam_epsilon,
                "weight_decay": args.weight_decay if name in decayed else 0.0,
            }
        return found

    return declared


def _refuse(trainer: Any, loss: Loss | None) -> None:
    """Raise UserError for a trainer that cannot be watched, with the reason."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    args = trainer.args
    if args.n_gpu > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or not replicates(trainer.accelerator):
        raise UserError(
            "watch_trainer takes a Trainer of one process and one device, or of several under DistributedDataParallel"
        )
    if args.fp16:
        raise UserError("watch_trainer does not support fp16, whose gradients are scaled when they are read; use bf16")
    if loss is not None:
        return
    kind = type(trainer.model).__name__
    if kind not in set(CAUSAL.values()):
        raise UserError(
            f"{kind} is not a causal language model of transformers: give loss=, a function of model and inputs"
        )
    # transformers 4.45 and before have no compute_loss_func.
    if getattr(trainer, "compute_loss_func", None) is not None or trainer.label_smoother is not None:
        raise UserError("compute_loss_func and label smoothing change the loss: give loss= and accumulate=")
    if getattr(trainer.model.config, "output_router_logits", False):
        raise UserError("output_router_logits adds the router's loss: give loss= and accumulate=")
