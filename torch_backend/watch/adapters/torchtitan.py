"""`watch_torchtitan`: check torchtitan's `Trainer` with a copy of its model, and a loss that is defined here.

    trainer = config.build()
    watcher = watch_torchtitan(trainer, every=100)
    trainer.train()
    print(watcher)

torchtitan runs forward and backward of all micro-batches, clips and updates inside `train_step`. This method is
replaced on the trainer by one that calls the original. During the call, `forward_backward_step` and
`post_dataloading_process` are also replaced, by methods that keep their arguments and call the original. After the last
micro-batch, gradients are complete.
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

# The value of a label that is not a target (torchtitan's IGNORE_INDEX).
NO_TARGET = -100
# A copy of the model creates its own masks: masks contain functions and tensors on the device.
MASKS = "attention_masks"
NOT_TAKEN = ("pp_enabled", "tp_enabled", "cp_enabled", "ep_enabled")

Loss = Callable[[Any, Any], Any]


def watch_torchtitan(
    trainer: Any, *, loss: Loss | None = None, accumulate: Accumulate = None, **settings: Any
) -> TitanWatcher:
    """Watch the steps of a `torchtitan.trainer.Trainer`, beginning with the next.

    It uses the trainer's clipping (`training.max_norm`), FSDP's casts, and the hyperparameters and schedule in the
    trainer's configuration. The default loss of a step is the sum of the cross-entropies of all ranks' micro-batches
    divided by their number of targets: labels that are not -100.

    Args:
        trainer: a built trainer, of one process, or of several with a model sharded by FSDP2.
        loss: `(model, part) -> loss` of one micro-batch; `part` is a mapping with `input`, `labels` and the model's
            keyword arguments.
        accumulate: with `loss`, how a step's loss follows from the micro-batches of all ranks, as in `watch`. Default:
            their sum.
        settings: other settings of `watch`; they override the trainer's.

    Raises UserError for a trainer that cannot be watched, and, at the next step, for settings that cannot work.
    """
    _refuse(trainer, loss)
    if loss is None:
        if accumulate is not None:
            raise UserError("accumulate= needs loss=: the default loss counts the targets of its micro-batches")
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
        """Build the watcher. It is built at the first step, because a checkpoint may be loaded before."""
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
        """Call the original method, with its clipping and update inside `watcher.step`."""
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
    """Sum the cross-entropies of a micro-batch: logits (rows, length, vocabulary), labels (rows, length)."""
    kwargs = {name: value for name, value in part.items() if name not in ("input", "labels")}
    if takes_masks(model) and "positions" in kwargs:
        kwargs[MASKS] = model.get_attention_masks(positions=kwargs["positions"])
        for module in model.modules():
            if type(module).__name__ == "FlexAttention":
                module.forward = attention_by_formula
    # With a loss that applies the head in chunks, torchtitan's model skips the head. Restore it in this copy.
    model._skip_lm_head = False
    logits: Tensor = model(part["input"], **kwargs)
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    labels = part["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1), ignore_index=NO_TARGET, reduction="sum")


def attention_by_formula(
    q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Any, scale: float | None = None,
    enable_gqa: bool = False, score_mod: Any = None, out_transform: Any = None, **_: Any,
) -> Tensor:  # fmt: skip
    """Compute torchtitan's FlexAttention by torch's attention call, as FlexAttention has no backward on the CPU.

    Tensors are (batch, length, heads, head dimension). Raises UserError for a score_mod or an out_transform.
    """
    if score_mod is not None or out_transform is not None:
        raise UserError("FlexAttention with a score_mod or an out_transform is not computed on the CPU")
    q_BNLH, k_BNLH, v_BNLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
    rows, keys = q_BNLH.shape[2], k_BNLH.shape[2]
    mask = create_mask(attention_masks.mask_mod, q_BLNH.shape[0], None, rows, keys, device=q_BLNH.device.type)
    y = F.scaled_dot_product_attention(q_BNLH, k_BNLH, v_BNLH, mask, scale=scale, enable_gqa=enable_gqa)
    return y.transpose(1, 2)


def takes_masks(model: Any) -> bool:
    """Return whether torchtitan's trainer creates masks for this model, as for FlexAttention and VarlenAttention."""
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention

    attention = getattr(getattr(model, "config", None), "first_attention", None)
    return isinstance(getattr(attention, "inner_attention", None), (FlexAttention.Config, VarlenAttention.Config))


def one_over_targets(parts: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the weight of each micro-batch's sum: 1 / the number of targets of all micro-batches."""
    return [1 / sum(int((part["labels"] != NO_TARGET).sum()) for part in parts)] * len(parts)


def declared_by(trainer: Any) -> Callable[[str, int], dict[str, Any]]:
    """Return a function from (parameter, step) to the hyperparameters that the trainer's configuration declares.

    A parameter belongs to the first group whose pattern matches its name. The learning rate is that of the group times
    the schedule's factor at the step.
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
        raise UserError(
            f"{type(inner).__name__} is not a loss that watch_torchtitan supports: give loss= and accumulate="
        )
