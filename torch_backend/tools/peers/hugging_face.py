"""Hugging Face's Trainer with LlamaForCausalLM, with the same shapes and weights as Lockstep's model."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor

from lockstep.core.hub.families import HUB
from lockstep.core.hub.tensors import stored_tensors
from lockstep.torch_backend.tools.hugging_face import their_arguments, their_weights
from lockstep.torch_backend.tools.peers.race import Race, Turn


def build(race: Race) -> Any:
    """Build LlamaForCausalLM with the race's weights and torch's own attention call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = their_arguments(race.config.model, race.config.train.sequence_length)
    settings |= {"attn_implementation": "sdpa", "use_cache": False}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    weights = their_weights(race.config.model, race.weights())
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and missing == (["lm_head.weight"] if race.config.model.tied else [])
    return model


class _Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The race's sequences as a data set, repeated endlessly."""

    def __init__(self, race: Race) -> None:
        self._rows = [
            {"input_ids": torch.from_numpy(t).long(), "labels": torch.from_numpy(y).long()}
            for batch in race.batches
            for t, y in zip(batch.tokens, batch.targets, strict=True)
        ]

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._rows[index % len(self._rows)]
        # transformers shifts `labels` by itself; our targets are already shifted.
        return {**row, "shift_labels": row["labels"]}


def run(race: Race, turn: Turn) -> None:
    """Train until `turn` raises Over."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    config = race.config
    model = build(race)
    theirs = dict(model.named_parameters())
    stored = stored_tensors(HUB[config.model.family], config.model)
    optimizer = race.fused_adamw({one.ours[0]: theirs[one.theirs] for one in stored})

    def factor(step: int) -> float:
        return race.rate(step + 1) / config.optim.peak_lr

    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * group["lr_factor"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    class Timed(Trainer):  # type: ignore[misc, unused-ignore]
        """A Trainer that stores the loss of a step."""

        found = 0.0

        def training_step(self, *arguments: Any, **options: Any) -> Tensor:
            loss: Tensor = super().training_step(*arguments, **options)
            self.found += loss.item()
            return loss

    class Turns(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """A callback that waits for the next turn at the end of a step."""

        def on_train_begin(self, *arguments: Any, **options: Any) -> None:
            turn(None)

        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            loss, trainer.found = trainer.found, 0.0
            turn(loss)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=10**6,
            per_device_train_batch_size=config.train.micro_batch_size,
            gradient_accumulation_steps=config.train.accumulation,
            max_grad_norm=config.optim.clip_norm,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            bf16=config.precision.chosen.rounds,
            torch_compile=config.compile.enabled,
            use_cpu=config.device == "cpu",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=config.device == "cuda",
        )
        trainer = Timed(model, arguments, train_dataset=_Rows(race), optimizers=(optimizer, scheduler))
        trainer.add_callback(Turns())
        trainer.train()
