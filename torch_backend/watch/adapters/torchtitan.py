"""`watch_torchtitan`: torchtitan's `Trainer` against a copy of the model that it trains, and a loss stated here.

    trainer = config.build()
    watcher = watch_torchtitan(trainer, every=100)
    trainer.train()
    print(watcher)

torchtitan runs forward and backward of all micro-batches, clips and steps inside `train_step`. This method is replaced
on the trainer by one that calls the original. While it runs, `forward_backward_step` and `post_dataloading_process` are
replaced as well, by ones that keep what they were given: after the last micro-batch, gradients are complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from lockstep.core.errors import UserError
from lockstep.torch_backend.watch.adapters.library_watcher import LibraryWatcher, replace_on
from lockstep.torch_backend.watch.api import watch
from lockstep.torch_backend.watch.parts import Accumulate

# The value of a label that is no target (torchtitan's IGNORE_INDEX).
NO_TARGET = -100
# A copy makes these by itself: masks hold functions, and tensors of the device.
MASKS = "attention_masks"
NOT_TAKEN = ("pp_enabled", "tp_enabled", "cp_enabled", "ep_enabled")

Loss = Callable[[Any, Any], Any]


def watch_torchtitan(
    trainer: Any, *, loss: Loss | None = None, accumulate: Accumulate = None, **settings: Any
) -> TitanWatcher:
    """Watch the steps of a `torchtitan.trainer.Trainer`, from the next on.

    Clipping (`training.max_norm`), FSDP's casts, and the optimizer's hyperparameters and schedule as its configuration
    declares them are read off the trainer. By default the loss of a step is the sum of the cross-entropies of all
    ranks' micro-batches over the number of their targets: labels that are not -100.

    Args:
        trainer: built; of one process, or of several that FSDP2 shards the model over.
        loss: `(model, part) -> loss` in place of that one: of one micro-batch, a mapping with `input`, `labels` and the
            model's keyword arguments.
        accumulate: with `loss`, how micro-batches of all ranks become a step, as `watch` has it. Default: their sum.
        settings: as `watch` has them; they come before what is read off the trainer.

    Raises UserError for what cannot be watched, and settings that cannot work when the next step begins.
    """
    _refuse(trainer, loss)
    if loss is None:
        if accumulate is not None:
            raise UserError("accumulate= goes with loss=: the default loss knows its micro-batches' targets")
        loss, accumulate = token_losses, one_over_targets
    return TitanWatcher(trainer, loss, accumulate or "sum", settings)


class TitanWatcher(LibraryWatcher):
    """The watcher of a trainer. Built by `watch_torchtitan`."""

    def __init__(self, trainer: Any, loss: Loss, accumulate: Accumulate, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self._trainer, self._loss, self._accumulate, self._settings = trainer, loss, accumulate, settings
        self._original = trainer.train_step
        self._put_back = replace_on(trainer, "train_step", self._train_step)

    def stop(self) -> None:
        """Restore the trainer's own `train_step`."""
        self._put_back()

    def _begin(self) -> None:
        """Build the watcher: a checkpoint may have been loaded until now."""
        trainer = self._trainer
        found = {
            "clip_norm": trainer.config.training.max_norm,
            "declared": declared_by(trainer),
            "start": trainer.step - 1,
        }
        self.watcher = watch(
            trainer.model_parts[0],
            list(trainer.optimizers),
            loss=self._loss,
            accumulate=self._accumulate,
            **(found | dict(self._settings)),
        )

    def _train_step(self, data_iterator: Any) -> Any:
        """Call the original, with the watcher around its clipping and update."""
        if self.watcher is None:
            self._begin()
        assert self.watcher is not None
        trainer, watcher = self._trainer, self.watcher
        process, forward_backward = trainer.post_dataloading_process, trainer.forward_backward_step
        parts: list[dict[str, Any]] = []
        losses: list[Tensor] = []
        with ExitStack() as stack, ExitStack() as step:

            def processed(input_dict: Any, labels: Any) -> Any:
                inputs, labels, kwargs = process(input_dict, labels)
                kept = {name: value for name, value in kwargs.items() if name != MASKS}
                parts.append({"input": inputs, "labels": labels, **kept})
                return inputs, labels, kwargs

            def ran(**given: Any) -> Any:
                loss = forward_backward(**given)
                losses.append(loss.detach().clone())
                if len(losses) == trainer.gradient_accumulation_steps:
                    step.enter_context(watcher.step(parts, sum(losses)))
                return loss

            stack.callback(replace_on(trainer, "post_dataloading_process", processed))
            stack.callback(replace_on(trainer, "forward_backward_step", ran))
            return self._original(data_iterator)


def token_losses(model: Any, part: Mapping[str, Any]) -> Tensor:
    """Sum the cross-entropies of a micro-batch: logits [rows, length, vocabulary] against labels [rows, length]."""
    kwargs = {name: value for name, value in part.items() if name not in ("input", "labels")}
    if takes_masks(model) and "positions" in kwargs:
        kwargs[MASKS] = model.get_attention_masks(positions=kwargs["positions"])
        for module in model.modules():
            if type(module).__name__ == "FlexAttention":
                module.forward = attention_by_formula
    # Where the loss applies the head chunk by chunk, the model is set to leave it out: this is a copy.
    model._skip_lm_head = False
    logits: Tensor = model(part["input"], **kwargs)
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    labels = part["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1), ignore_index=NO_TARGET, reduction="sum")


def attention_by_formula(
    q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Any, scale: float | None = None,
    enable_gqa: bool = False, score_mod: Any = None, out_transform: Any = None, **_: Any,
) -> Tensor:  # fmt: skip
    """Compute what torchtitan's FlexAttention does, which has no backward pass on the CPU.

    [batch, length, heads, head] each. Raises UserError for a modified score and a transformed output.
    """
    if score_mod is not None or out_transform is not None:
        raise UserError("FlexAttention with a score_mod or an out_transform is not computed on the CPU")
    q_BNLH, k_BNLH, v_BNLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
    rows, keys = q_BNLH.shape[2], k_BNLH.shape[2]
    mask = create_mask(attention_masks.mask_mod, q_BLNH.shape[0], None, rows, keys, device=q_BLNH.device.type)
    y = F.scaled_dot_product_attention(q_BNLH, k_BNLH, v_BNLH, mask, scale=scale, enable_gqa=enable_gqa)
    return y.transpose(1, 2)


def takes_masks(model: Any) -> bool:
    """Return whether torchtitan's trainer makes masks for this model: FlexAttention and VarlenAttention."""
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention

    attention = getattr(getattr(model, "config", None), "first_attention", None)
    return isinstance(getattr(attention, "inner_attention", None), (FlexAttention.Config, VarlenAttention.Config))


def one_over_targets(parts: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return weights that make sums over micro-batches the mean over the targets of all."""
    return [1 / sum(int((part["labels"] != NO_TARGET).sum()) for part in parts)] * len(parts)


def declared_by(trainer: Any) -> Callable[[str, int], dict[str, Any]]:
    """Return the hyperparameters of a parameter at a step, as the trainer's configuration declares them.

    The first group whose pattern is found in a parameter's name is its own. The learning rate is that group's times the
    schedule's factor at the step's number.
    """
    groups = trainer.config.optimizer.param_groups
    (factor, *others) = {
        factor for scheduler in trainer.lr_schedulers.schedulers for factor in getattr(scheduler, "lr_lambdas", [None])
    }
    optimizers = {name: key for optimizer in trainer.optimizers for group in optimizer.param_groups
                  for key in [set(group)] for name in group.get("param_names", [])}  # fmt: skip

    def declared(name: str, step: int) -> dict[str, Any]:
        plain = ".".join(part for part in name.split(".") if part != "_checkpoint_wrapped_module")
        group = next((one for one in groups if re.search(one.pattern, name)), None)
        if group is None:
            return {}
        known = optimizers.get(plain, set())
        found = {key: value for key, value in group.optimizer_kwargs.items() if key in known and key != "lr"}
        if "lr" in group.optimizer_kwargs and factor is not None and not others:
            found["lr"] = group.optimizer_kwargs["lr"] * factor(step - 1)
        return found

    return declared


def _refuse(trainer: Any, loss: Loss | None) -> None:
    """Raise UserError for a trainer that cannot be watched, with the reason."""
    dims = trainer.parallel_dims
    if found := [name.partition("_")[0] for name in NOT_TAKEN if getattr(dims, name, False)]:
        raise UserError(f"watch_torchtitan takes data parallelism alone; this trainer has {', '.join(found)}")
    if loss is not None:
        return
    inner = getattr(trainer.loss_fn, "loss_fn", trainer.loss_fn)
    if type(inner).__name__ != "CrossEntropyLoss":
        raise UserError(f"{type(inner).__name__} is no loss that watch_torchtitan knows: say loss= and accumulate=")
