"""Watch torchtitan's own Trainer on its debug model.

Tokenizer and data are replaced: the data are random tokens, and some of them are no targets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from lockstep import watch_torchtitan
from lockstep.torch_backend.watch.adapters.torchtitan import TitanWatcher

ROWS, LENGTH, VOCAB, STEPS, CLIP = 2, 16, 2048, 3, 0.5


class NoTokenizer(BaseTokenizer):
    """A tokenizer without a function, which torchtitan requires, although the data are tokens already."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCAB


class Drawn(BaseDataLoader):
    """Random tokens, two documents per row. Tokens and the number of targets differ between ranks and batches."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Any, *, dp_rank: int, **_: Any) -> None:
        self._rank = dp_rank

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator().manual_seed(self._rank)
        positions = torch.cat([torch.arange(6), torch.arange(LENGTH - 6)]).repeat(ROWS, 1)
        number = self._rank
        while True:
            tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=generator)
            labels = tokens[:, 1:].clone()
            labels[0, : 3 * (number % 4)] = -100
            number += 1
            yield {"input": tokens[:, :-1], "positions": positions.clone()}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class TimesMicroBatches(Trainer):
    """Gradients are too large by a factor of the number of micro-batches."""

    def forward_backward_step(self, **given: Any) -> Any:
        return super().forward_backward_step(
            **given | {"global_valid_tokens": given["global_valid_tokens"] / self.gradient_accumulation_steps}
        )


class MeanOfMeans(Trainer):
    """The loss is the mean of the micro-batches' own means, not the mean over all targets."""

    def forward_backward_step(self, **given: Any) -> Any:
        count = (given["labels"] != -100).sum() * self.gradient_accumulation_steps * dist.get_world_size()
        return super().forward_backward_step(**given | {"global_valid_tokens": count})


class LocalTokens(Trainer):
    """Each rank divides by its own number of targets times the number of ranks, not by the number over all ranks."""

    def forward_backward_step(self, **given: Any) -> Any:
        count = (given["labels"] != -100).sum() * dist.get_world_size()
        return super().forward_backward_step(**given | {"global_valid_tokens": count})


def no_clip(trainer: Trainer) -> None:
    """Plant a fault: clipping uses a limit of 1e9, not that of the configuration."""
    original = trainer.train_step

    def train_step(data: Any) -> Any:
        limit, trainer.config.training.max_norm = trainer.config.training.max_norm, 1e9
        try:
            return original(data)
        finally:
            trainer.config.training.max_norm = limit

    setattr(trainer, "train_step", train_step)  # noqa: B010 - a method


def other_betas(trainer: Trainer) -> None:
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            group["betas"] = (0.9, 0.999)


def schedule_twice(trainer: Trainer) -> None:
    original = trainer.lr_schedulers.step

    def step() -> None:
        original()
        original()

    setattr(trainer.lr_schedulers, "step", step)  # noqa: B010 - a method


def nothing(_: Trainer) -> None:
    """Plant no fault."""


CASES: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "float32"},
    "bf16": {},
    "accumulated": {"parts": 2},
    "chunked": {"chunks": 4, "precision": "float32"},
    "chunked, bf16, accumulated": {"chunks": 4, "parts": 2},
    "times micro-batches": {"kind": TimesMicroBatches, "parts": 2},
    "mean of means": {"kind": MeanOfMeans, "parts": 2, "precision": "float32"},
    "local tokens": {"kind": LocalTokens, "precision": "float32"},
    "no clip": {"spoil": no_clip},
    "other betas": {"spoil": other_betas},
    "schedule twice": {"spoil": schedule_twice},
}


def built(
    folder: Path, kind: type[Trainer] = Trainer, precision: str = "bfloat16", parts: int = 1, chunks: int = 0
) -> Trainer:
    """Return a trainer of the debug model for STEPS steps on the CPU."""
    config: Any = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.dump_folder, config.tokenizer, config.dataloader = str(folder), NoTokenizer.Config(), Drawn.Config()
    inner = CrossEntropyLoss.Config()
    config.loss = ChunkedLossWrapper.Config(loss_fn=inner, num_chunks=chunks) if chunks else inner
    config.lr_scheduler.warmup_steps, config.lr_scheduler.total_steps = 2 * STEPS, 4 * STEPS
    config.optimizer = default_adamw(lr=8e-4)
    config.optimizer.implementation = "foreach"
    training = config.training
    training.local_batch_size, training.seq_len, training.steps, training.max_norm = ROWS, LENGTH, STEPS, CLIP
    training.global_batch_size = ROWS * parts * dist.get_world_size()
    training.disable_cuda_graphs, training.mixed_precision_param = True, precision
    config.activation_checkpoint, config.validator.enable, config.checkpoint.enable = None, False, False
    if dist.get_world_size() > 1:
        # With torchtitan's default, spmd_types, torch 2.13's fully_shard raises an error on several ranks.
        config.parallelism.spmd_backend = "partial_dtensor"
    trainer = kind(config)
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            # gloo can sum, but not multiply the sum in the same operation.
            module.set_force_sum_reduction_for_comms(True)
    return trainer


def train(folder: Path, spoil: Callable[[Trainer], None] = nothing, **given: Any) -> TitanWatcher:
    torch.manual_seed(0)
    trainer = built(folder, **given)
    spoil(trainer)
    watcher = watch_torchtitan(trainer, every=1)
    trainer.train()
    trainer.close()
    return watcher


def told(watcher: TitanWatcher) -> dict[str, Any]:
    bad = next((check for check in watcher.checks if check.verdict == "disagreed"), None)
    return {
        "headline": watcher.headline,
        "step": bad and bad.step,
        "stages": sorted({f.stage for f in bad.findings if not f.ok}) if bad else [],
        "cause": bad and bad.cause,
        "notes": sorted({f.note for f in bad.findings if not f.ok and f.note}) if bad else [],
        "compared": sorted({f.stage for f in watcher.checks[0].findings}),
        "not_covered": watcher.checks[0].not_covered,
    }
